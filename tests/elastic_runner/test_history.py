"""The history is a fold over the record: what each attempt came from, how it ended, and what coming back cost."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.history import Phases, fold, tile
from goodrun.elastic_runner.journal import FILE_NAME, Journal, read_events

Story = list[ev.Event]


def at(t: float, event: ev.Event, attempt: int = 0) -> ev.Event:
    """The event as the journal would have stamped it."""
    return dataclasses.replace(event, t=t, wall=f"2026-11-30T06:25:{t % 60:06.3f}+00:00", node="n1", attempt=attempt)


def start(t: float = 1.0, slots: tuple[int, ...] = (0, 1), **more: object) -> Story:
    """A launcher takes the job, and its first attempt gets going: one step per second from t + 4 on."""
    run = ev.RunStarted(run_id="r1", script="train.py", slots=slots, pid=7, **more)  # type: ignore[arg-type]
    return [
        at(t, run, -1),
        at(t + 1, ev.AttemptStarted(world_size=2, slots=slots[:2])),
        at(t + 1.1, ev.WorkersSpawned(pids=(8, 9))),
        at(t + 4, ev.FirstStep(step=1, first_step_t=t + 4)),
    ]


def failure(
    t: float, *, kind: str = "signal", cause: str = "rank 1 killed by SIGKILL (slot 1)", best: int = 10, attempt: int = 0
) -> ev.Event:
    """A failure noticed at `t`, half a second after it happened."""
    return at(t, ev.Failed(kind=kind, rank=1, slot=1, step=best, best_step=best, cause=cause, fault_t=t - 0.5), attempt)


def stop(t: float, do: str, slots: tuple[int, ...], reason: str, attempt: int = 0) -> Story:
    """What policy made of it at `t`, and the end of the old processes a second later."""
    return [
        at(t, ev.Decided(action=do, slots=slots, reason=reason), attempt),
        at(t, ev.Stopping(signal="SIGTERM", why="restart"), attempt),
        at(t + 1, ev.Stopped(seconds=1.0), attempt),
    ]


def again(t: float, attempt: int, slots: tuple[int, ...], step: int) -> Story:
    """A new attempt that forms at `t` and has every mark in order, the first step eight seconds later."""
    marks = ev.FirstStep(
        step=step + 1, boot_t=t + 1, torch_t=t + 3, init_t=t + 3.5, restore_begin_t=t + 4.5, restore_end_t=t + 5, first_step_t=t + 8
    )
    return [
        at(t, ev.AttemptStarted(world_size=len(slots), slots=slots, rendezvous_s=0.25), attempt),
        at(t + 0.1, ev.WorkersSpawned(), attempt),
        at(t + 8, ev.Restored(step=step, source=f"/ck/step-{step}.0", seconds=0.5), attempt),
        at(t + 8.1, marks, attempt),
    ]


def test_a_restart_by_kill() -> None:
    """The attempt after a kill knows whence it went on, what it redid, and what each phase of coming back took."""
    story = [*start(), failure(14.5), *stop(14.75, "restart", (0, 1), "strike 1 for slot 1"), *again(17.0, 1, (0, 1), 8)]
    story += [at(40, ev.RankProgress(steps=(20, 20)), 1), at(41, ev.RunEnded(outcome="succeeded", step=20), 1)]
    history = fold(story)
    first, second = history.attempts
    assert (first.kind, first.cause, first.decided, first.reason) == (
        "signal",
        "rank 1 killed by SIGKILL (slot 1)",
        "restart",
        "strike 1 for slot 1",
    )
    assert (first.best_step, first.recovery, first.steps_redone, first.restored_step) == (10, None, None, -1)
    assert (second.kind, second.cause, second.restored_from, second.restored_step) == ("finished", "finished", "/ck/step-8.0", 8)
    assert (second.steps_redone, second.best_step, second.left_out) == (2, 20, ())
    assert second.recovery == Phases(detect=0.5, stop=1.25, rendezvous=1.25, start=1.0, imports=2.0, init=0.5, restore=0.5, first_step=4.0)
    assert second.recovery.total == 11.0
    # the first attempt made 9 steps in 9 s, the second 11 in 15 s
    assert history.redone_s == pytest.approx(2 * 24 / 20)
    assert history.seconds_lost == pytest.approx(11.0 + 2.4)
    assert (history.outcome, history.restarts, history.best_step, history.run_id) == ("succeeded", 1, 20, "r1")


def test_a_shrink_names_the_slot_left_out() -> None:
    """A restart on fewer slots says in words which slot goes, and the attempt shows it as left out."""
    story = [*start(), failure(10), *stop(10, "restart without", (0,), "slot 1 is lost: going on with 1 of 2"), *again(12, 1, (0,), 5)]
    first, second = fold(story).attempts
    assert first.decided == "restart without slot 1"
    assert (second.world_size, second.slots, second.left_out, second.cause) == (1, (0,), (1,), "running")


def test_a_spare_takes_the_place() -> None:
    """Where a spare steps in, the words name both slots; a spare that was never used is not 'left out'."""
    story = [*start(slots=(0, 1, 2, 3), spares=(2, 3)), failure(10), *stop(10, "restart without", (0, 2), ""), *again(12, 1, (0, 2), 5)]
    first, second = fold(story).attempts
    assert (first.decided, first.left_out, second.left_out) == ("restart without slot 1, with slot 2", (), (1,))


def test_a_hang_counts_from_its_last_beat() -> None:
    """Detection of a hang lasts from the moment at which the rank stood still, and progress written meanwhile sets no pace."""
    failed = at(20, ev.Failed(kind="hang", rank=1, slot=1, best_step=6, cause="rank 1 hung (slot 1)", fault_t=10.0))
    story = [*start(), at(19, ev.RankProgress(steps=(6, 6))), failed, *stop(20, "restart", (0, 1), ""), *again(22, 1, (0, 1), 4)]
    history = fold(story)
    recovery = history.attempts[1].recovery
    assert recovery is not None
    assert recovery.detect == 10.0
    assert history.attempts[1].steps_redone == 2
    assert history.redone_s == 2.0  # steps 2…6 took the 5 s before the fault, not the 14 until the progress line


def test_first_failure_and_last_decision_count() -> None:
    """Where several failures of one attempt were written, its cause is the first; what was done is what was decided last."""
    story = [*start(), failure(10, cause="first"), *stop(10, "restart", (0, 1), "once"), failure(11, cause="second")]
    story.append(at(11, ev.Decided(action="give up", reason="enough")))
    (only,) = fold(story).attempts
    assert (only.cause, only.decided, only.reason) == ("first", "give up", "enough")


def test_a_restore_ahead_of_the_record_redoes_nothing() -> None:
    """A checkpoint may be newer than the last progress line: then nothing is redone, never less than nothing."""
    story = [*start(), failure(10, best=3), *stop(10, "restart", (0, 1), ""), *again(12, 1, (0, 1), 5)]
    assert fold(story).attempts[1].steps_redone == 0


def test_giving_up_ends_the_run_as_failed() -> None:
    """A run that gives up shows the failure it gave up on, the decision, and the run's own reason and status."""
    failed = at(9, ev.Failed(kind="exception", rank=0, cause="rank 0 raised ValueError", message="ValueError: no", log="/l/0", fault_t=9))
    decided = at(9, ev.Decided(action="give up", slots=(0, 1), reason="it crashed after step 3 again"))
    history = fold([*start(), failed, decided, at(10, ev.RunEnded(outcome="failed", status=1, reason="rank 0 raised ValueError"))])
    (only,) = history.attempts
    assert (only.cause, only.decided, only.message, only.log) == ("rank 0 raised ValueError", "give up", "ValueError: no", "/l/0")
    assert (history.outcome, history.status, history.reason, history.restarts) == ("failed", 1, "rank 0 raised ValueError", 0)


def test_stopped_by_a_signal() -> None:
    """A run that was asked to end says by which signal; that is no failure and no restart."""
    story = [*start(), at(9, ev.Stopping(signal="SIGTERM", why="signal")), at(10, ev.Stopped()), at(10, ev.RunEnded(outcome="stopped"))]
    history = fold(story)
    assert [(a.kind, a.cause, a.decided) for a in history.attempts] == [("stopped", "stopped by SIGTERM", "")]
    assert (history.outcome, history.restarts) == ("stopped", 0)


def test_a_planned_restart_counts_from_the_decision() -> None:
    """Growing is no fault: the cause is the decision's reason, nothing was detected, and the clock starts at the decision."""
    story = [*start(), *stop(20, "grow", (0, 1, 2), "slot 2 came back"), *again(22, 1, (0, 1, 2), 9)]
    first, second = fold(story).attempts
    assert (first.kind, first.cause, first.decided) == ("replaced", "slot 2 came back", "grow with slot 2")
    assert second.recovery is not None
    assert (second.recovery.detect, second.recovery.stop) == (0.0, 1.0)


def test_an_attempt_that_died_before_its_first_step() -> None:
    """What such an attempt took is lost too: its recovery reaches to its own fault and is marked as unfinished."""
    story = [*start(), failure(10), *stop(10, "restart", (0, 1), ""), at(12, ev.AttemptStarted(world_size=2, slots=(0, 1)), 1)]
    story += [failure(15, best=-1, attempt=1), *stop(15, "restart", (0, 1), "", 1), *again(17, 2, (0, 1), 3)]
    history = fold(story)
    _, dead, third = history.attempts
    assert dead.recovery is not None
    assert not dead.recovery.finished
    assert dead.recovery.total == 5.0  # from the fault at 9.5 to the next at 14.5
    assert third.recovery is not None
    assert third.recovery.total == 10.5
    assert (third.steps_redone, history.recovery_s) == (7, 15.5)


def test_two_lives_in_one_record() -> None:
    """A second launcher's attempts are listed after the first's; its start is no restart, and the first has died of its own."""
    second = [at(500, ev.RunStarted(run_id="r2", script="train.py", slots=(0, 1)), 0), *again(501, 1, (0, 1), 4)]
    history = fold([*start(), at(9, ev.RankProgress(steps=(6, 5))), *second])
    assert [(a.life, a.attempt, a.cause) for a in history.attempts] == [(1, 0, "the launcher died"), (2, 1, "running")]
    assert (history.lives, history.restarts, history.run_id, history.outcome) == (2, 0, "r2", "running")
    assert history.attempts[1].recovery is None
    assert history.attempts[1].steps_redone == 2


def test_running_and_gone() -> None:
    """A record without an end is a running run, unless the launcher is known to be gone."""
    assert [(h.outcome, h.attempts[0].cause) for h in (fold(start()), fold(start(), gone=True))] == [
        ("running", "running"),
        ("died", "the launcher died"),
    ]


def test_an_empty_record_folds() -> None:
    """No event, or a run that ended before any attempt, is a history without attempts."""
    assert fold([]).attempts == ()
    early = fold([start()[0], at(2, ev.Failed(cause="port taken")), at(2, ev.RunEnded(outcome="failed", reason="port taken"))])
    assert (early.attempts, early.outcome, early.reason) == ((), "failed", "port taken")


def test_chaos_and_notices_are_kept() -> None:
    """What chaos did, what it never came to do, and the remarks for people are part of the history."""
    ended = ev.RunEnded(outcome="succeeded", chaos_unfired=("kill:rank=0@step=99",))
    story = [*start(), at(8, ev.ChaosFired(index=0, entry="kill:rank=1@step=3", rank=1)), at(9, ev.Notice(text="mind")), at(9, ended)]
    history = fold(story)
    assert [(e.entry, e.attempt) for e in history.chaos_fired] == [("kill:rank=1@step=3", 0)]
    assert (history.chaos_unfired, history.notices) == (("kill:rank=0@step=99",), ("mind",))


@pytest.mark.timeout(60)
def test_any_part_of_a_record_folds(tmp_path: Path) -> None:
    """A record torn anywhere, or with any lines missing, still folds; a torn line costs that line only."""
    story = [*start(), failure(14.5), *stop(14.75, "restart without", (0,), "lost"), *again(17.0, 1, (0,), 8)]
    story += [at(40, ev.RankProgress(steps=(20,)), 1), at(41, ev.RunEnded(outcome="succeeded", step=20), 1)]
    journal = Journal(tmp_path)
    for event in story:
        journal.write(event)
    journal.close()
    record = tmp_path / FILE_NAME
    whole = record.read_bytes()
    lines = whole.splitlines(keepends=True)
    rng = random.Random(11)
    for _ in range(200):
        kept = [line for line in lines if rng.random() < 0.7]
        record.write_bytes(b"".join(kept)[: rng.randrange(len(whole))] + rng.choice([b"", b'{"event": "fail', b"\xff\x00\n"]))
        for attempt in fold(read_events(tmp_path)).attempts:
            assert attempt.cause
            assert attempt.recovery is None or min(attempt.recovery.spent().values()) >= 0
    record.write_bytes(whole[:-5])
    assert [a.cause for a in fold(read_events(tmp_path)).attempts] == ["rank 1 killed by SIGKILL (slot 1)", "running"]


def test_phases_tile_the_interval() -> None:
    """Whatever marks are missing, early, late or out of order, the phases are not negative and sum to fault → first step exactly."""
    names = [name for name in Phases().spent() if name != "first_step"]
    rng = random.Random(7)
    for _ in range(3000):
        begin = round(rng.uniform(1, 1e6), rng.randrange(7))
        end = round(begin + rng.uniform(-1, 100), rng.randrange(7))
        order = sorted if rng.random() < 0.5 else list
        moments = order(rng.uniform(begin - 10, end + 10) for _ in names)
        marks = [(name, 0.0 if rng.random() < 0.3 else t) for name, t in zip(names, moments, strict=True)]
        phases = tile(begin, marks, end)
        assert min(phases.spent().values()) >= 0
        assert phases.total == round(max(round(end, 6) - round(begin, 6), 0), 6)
        assert all(getattr(phases, name) == 0 for name, t in marks if t == 0)


def test_a_missing_mark_goes_to_the_next_phase() -> None:
    """The time of a phase whose end was never marked is counted in the next phase that was."""
    assert tile(10, [("detect", 11), ("stop", 0), ("rendezvous", 13), ("start", 0)], 20) == Phases(detect=1, rendezvous=2, first_step=7)


def test_the_fold_tiles_a_recovery_too() -> None:
    """Through the fold as well: total = first step − fault, for random marks, also where lines are missing."""
    rng = random.Random(5)
    for _ in range(500):
        marks = [0.0 if rng.random() < 0.3 else rng.uniform(15, 31) for _ in range(5)]
        first = ev.FirstStep(
            step=9, boot_t=marks[0], torch_t=marks[1], init_t=marks[2], restore_begin_t=marks[3], restore_end_t=marks[4], first_step_t=30.0
        )
        middle = [e for e in stop(15.5, "restart", (0, 1), "") if rng.random() < 0.7]
        story = [*start(), failure(15), *middle, at(18, ev.AttemptStarted(world_size=2), 1), at(30.5, first, 1)]
        recovery = fold(story).attempts[1].recovery
        assert recovery is not None
        assert recovery.total == 15.5
        assert round(sum(recovery.spent().values()), 6) == recovery.total
