"""Every slot-second of a run is in exactly one bucket, whatever the record has lost; and what a fault took back is no longer productive."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodrun.elastic_runner import events as ev
from goodrun.elastic_runner.dashboard.board import Board
from goodrun.elastic_runner.dashboard.follow import Follower
from goodrun.elastic_runner.goodput.account import Goodput, account, balance
from goodrun.elastic_runner.goodput.buckets import Bucket
from goodrun.elastic_runner.goodput.ledger import Ledger
from goodrun.elastic_runner.journal import FILE_NAME, parse_line, read_events, read_thinned

Story = list[ev.Event]


def at(t: float, event: ev.Event, attempt: int = 0, node: str = "n1", wall0: float = 0.0) -> ev.Event:
    """The event as the journal would have stamped it."""
    seconds = wall0 + t
    wall = f"2026-11-30T{int(seconds // 3600) % 24:02}:{int(seconds // 60) % 60:02}:{seconds % 60:06.3f}+00:00"
    return dataclasses.replace(event, t=t, wall=wall, node=node, attempt=attempt)


def begin(t: float = 0.0, slots: tuple[int, ...] = (0, 1), spares: tuple[int, ...] = ()) -> Story:
    """A launcher starts: ranks spawned after 1 s, up at 2, torch at 5, group at 6, and one step a second from 10 on."""
    return [
        at(t, ev.RunStarted(run_id="r", slots=slots, spares=spares), -1),
        at(t + 1, ev.AttemptStarted(world_size=len(slots), slots=slots)),
        at(t + 10.2, ev.FirstStep(step=1, boot_t=t + 2, torch_t=t + 5, init_t=t + 6, first_step_t=t + 10)),
    ]


def beat(t: float, step: int, attempt: int = 0, ranks: int = 2, **more: object) -> ev.Event:
    """Progress at `t`, the newest step finished right then."""
    return at(t, ev.RankProgress(steps=(step,) * ranks, step_t=t, **more), attempt)  # type: ignore[arg-type]


def fault(t: float, step: int, attempt: int = 0) -> Story:
    """A fault at `t`, known half a second later, all processes gone one second after that."""
    return [
        at(t + 0.5, ev.Failed(kind="signal", rank=1, slot=1, step=step, best_step=step, fault_t=t), attempt),
        at(t + 0.5, ev.Decided(action="restart", slots=(0, 1)), attempt),
        at(t + 0.5, ev.Stopping(signal="SIGTERM", why="restart"), attempt),
        at(t + 1.5, ev.Stopped(seconds=1.0), attempt),
    ]


def again(t: float, attempt: int, restored: int, slots: tuple[int, ...] = (0, 1)) -> Story:
    """The next attempt: group at `t`, up 1 s later, torch 2, group 3, model built 4, restored 5, first step 6."""
    marks = ev.FirstStep(
        step=restored + 1, boot_t=t + 1, torch_t=t + 2, init_t=t + 3, restore_begin_t=t + 4, restore_end_t=t + 5, first_step_t=t + 6
    )
    return [
        at(t, ev.AttemptStarted(world_size=len(slots), slots=slots), attempt),
        at(t + 6.1, ev.Restored(step=restored), attempt),
        at(t + 6.2, marks, attempt),
    ]


def spent(goodput: Goodput) -> dict[str, float]:
    """The buckets that are not empty."""
    return {name: seconds for name, seconds in goodput.buckets.items() if seconds}


def conserved(goodput: Goodput) -> bool:
    """The buckets sum to the whole, to the microsecond, and none is negative."""
    return round(sum(goodput.buckets.values()), 6) == round(goodput.slot_s, 6) and min(goodput.buckets.values()) >= 0


def test_a_quiet_run() -> None:
    """Start-up is cut at its marks; every step is productive; what follows the last step is the way out."""
    goodput = account([*begin(), beat(15, 6), beat(20, 11), at(23, ev.RunEnded(outcome="succeeded"))])
    assert spent(goodput) == {
        "start-up: launch": 4.0, "start-up: import": 6.0, "start-up: init": 2.0, "start-up: first step": 8.0,
        "productive": 20.0, "shutdown": 6.0,
    }  # fmt: skip
    assert (goodput.wall_s, goodput.slot_s) == (23.0, 46.0)
    assert goodput.time_goodput == goodput.capacity_goodput == goodput.ettr == pytest.approx(10 / 23)


def test_a_fault_and_what_it_took_back() -> None:
    """From the fault on every phase has its bucket; the steps after the checkpoint are booked anew as redone, and so is half a step."""
    story = [*begin(), beat(15, 6), beat(20, 11), *fault(20.5, 11), *again(24, 1, restored=8), beat(40, 19, 1)]
    goodput = account([*story, at(41, ev.RunEnded(outcome="succeeded"), 1)])
    assert spent(goodput) == {
        "start-up: launch": 4.0, "start-up: import": 6.0, "start-up: init": 2.0, "start-up: first step": 8.0,
        "fault: detect": 1.0, "fault: stop": 2.0, "fault: rendezvous": 4.0, "fault: start": 2.0, "fault: import": 2.0,
        "fault: init": 2.0, "fault: restore": 2.0, "fault: first step": 4.0,
        "redone work": 2 * (3.0 + 0.5), "productive": 2 * (7.0 + 10.0), "shutdown": 2.0,
    }  # fmt: skip
    assert conserved(goodput) and goodput.redone_known


def test_nothing_is_redone_before_it_is_known() -> None:
    """Until the next attempt says where it goes on, the steps count as productive; with the checkpoint of the last step none is lost."""
    story = [*begin(), beat(20, 11), *fault(20, 11)]
    assert account(story).buckets["productive"] == 20.0
    assert account([*story, *again(24, 1, restored=11)]).buckets["redone work"] == 0.0
    assert account([*story, *again(24, 1, restored=0)]).buckets["productive"] == 0.4  # the new attempt's


def test_steps_are_taken_back_once() -> None:
    """Two faults that fall back to the same checkpoint take back the first attempt's steps once, and the second attempt's all."""
    story = [*begin(), beat(20, 11), *fault(20, 11), *again(24, 1, restored=8), beat(35, 14, 1), *fault(35, 14, 1)]
    story += [*again(40, 2, restored=8), beat(50, 13, 2)]
    goodput = account(story)
    assert goodput.buckets["redone work"] == 2 * (3.0 + 5.0)
    assert conserved(goodput)


def test_a_script_that_does_not_number_its_steps() -> None:
    """Where nothing tells whether an attempt repeats earlier steps none is called redone, and the answer says that it does not know."""
    story = [*begin(), beat(20, 11), *fault(20, -1), *again(24, 1, restored=0)]
    goodput = account([e for e in story if not isinstance(e, ev.Restored)])
    assert goodput.buckets["redone work"] == 0.0
    assert not goodput.redone_known


def test_a_hang_is_no_training() -> None:
    """Progress written while a rank stood still is taken back to its last beat once the hang is known."""
    failed = at(40, ev.Failed(kind="hang", rank=1, slot=1, step=11, best_step=11, fault_t=20.5))
    slow = [beat(20, 11), at(25, ev.RankProgress(steps=(12, 11), step_t=21.0)), at(35, ev.RankProgress(steps=(12, 11), step_t=21.0))]
    goodput = account([*begin(), *slow, failed])
    assert goodput.buckets["fault: detect"] == 2 * 19.5
    assert goodput.buckets["productive"] == 2 * 10.5
    assert conserved(goodput)


def test_waits_are_taken_out_of_the_steps() -> None:
    """Ranks in lockstep are all held up by the slowest loader; stalls and evaluations too; what came before the first step is start-up."""
    story = begin()
    story.insert(2, at(10.1, ev.RankProgress(steps=(1, 1), data_wait_s=(3.0, 3.0))))
    story.append(beat(20, 11, data_wait_s=(5.0, 3.5), save_stall_s=(1.0, 1.0), eval_s=(0.5, 0.25)))
    goodput = account(story)
    assert (goodput.buckets["data wait"], goodput.buckets["checkpoint stall"], goodput.buckets["evaluation"]) == (4.0, 2.0, 1.0)
    assert goodput.buckets["productive"] == 20.0 - 7.0


def test_ranks_that_do_not_wait_for_each_other_wait_for_themselves() -> None:
    """Where the ranks' steps drift apart, each is charged its own wait alone."""
    goodput = account([*begin(), at(20, ev.RankProgress(steps=(11, 5), step_t=20, data_wait_s=(1.0, 6.0)))])
    assert goodput.buckets["data wait"] == 7.0


def test_a_wait_longer_than_a_report_is_not_lost() -> None:
    """A fetch that takes longer than the time between two reports is booked as what it was, in the end."""
    story = [*begin(), beat(15, 6), at(20, ev.RankProgress(steps=(6, 6), step_t=15, data_wait_s=(4.5, 4.5)))]
    assert account(story).buckets["data wait"] == 9.0
    goodput = account([*story, beat(27, 7, data_wait_s=(11.0, 11.0))])
    assert goodput.buckets["data wait"] == 22.0
    assert goodput.buckets["productive"] == 2 * (5 + 1)


def test_a_smaller_world_costs_capacity() -> None:
    """Going on with one slot of two leaves the time goodput whole and halves that of the capacity; the other slot idles."""
    story = [*begin(), beat(20, 11), *fault(20, 11), *again(24, 1, restored=11, slots=(0,)), beat(130, 111, 1, ranks=1)]
    goodput = account(story)
    assert goodput.buckets["idle capacity"] == 106.0
    assert goodput.buckets["productive"] == 20 + 100
    assert goodput.time_goodput == pytest.approx((10 + 100) / 130)
    assert goodput.capacity_goodput == pytest.approx(120 / 260)


def test_a_reserve_is_idle_but_was_not_asked_for() -> None:
    """Slots in reserve are in the book as idle, and leave the capacity goodput alone."""
    goodput = account([*begin(spares=(2,)), beat(20, 11)])
    assert goodput.buckets["idle capacity"] == 20.0
    assert goodput.capacity_goodput == goodput.time_goodput == 0.5


def test_seven_of_eight_for_a_quarter_of_a_day() -> None:
    """The definition's own example: 7 of 8 GPUs for 6 h of a 24 h run is 100 % of the time, 96.9 % of the capacity."""
    eight, seven = tuple(range(8)), tuple(range(7))
    story: Story = [at(0, ev.RunStarted(slots=eight)), at(0, ev.AttemptStarted(slots=eight)), at(0, ev.FirstStep(step=0))]
    story += [beat(18 * 3600, 100, ranks=8), at(18 * 3600, ev.Decided(action="restart without"))]
    story += [at(18 * 3600, ev.AttemptStarted(slots=seven), 1), at(18 * 3600, ev.Restored(step=100), 1)]
    story += [at(18 * 3600, ev.FirstStep(step=101), 1), beat(24 * 3600, 200, 1, ranks=7)]
    goodput = account(story)
    assert goodput.time_goodput == pytest.approx(1.0)
    assert round(goodput.capacity_goodput, 3) == 0.969


def test_two_lives_and_the_time_between() -> None:
    """A resumed run has the time between its launchers in ETTR alone; what the first life did past the checkpoint is redone."""
    second = [at(t, e, attempt) for t, e, attempt in [(0, ev.RunStarted(slots=(0, 1)), -1), (1, ev.AttemptStarted(slots=(0, 1)), 0)]]
    second += [at(5, ev.Restored(step=6)), at(5, ev.FirstStep(step=7, first_step_t=5)), beat(15, 17)]
    second = [dataclasses.replace(e, wall=at(e.t, e, wall0=120.0).wall) for e in second]  # another boot: its clock begins anew
    goodput = account([*begin(), beat(20, 11), *second])
    assert (goodput.wall_s, goodput.between_s) == (35.0, 100.0)
    assert goodput.buckets["redone work"] == 10.0
    assert goodput.time_goodput == pytest.approx((5 + 10) / 35)
    assert goodput.ettr == pytest.approx((5 + 10) / 135)


def test_a_script_whose_steps_nobody_sees() -> None:
    """Without a step the time is called unknown, not productive and not start-up."""
    goodput = account([*begin()[:2], at(50, ev.RankProgress(steps=(-1, -1))), at(60, ev.RunEnded(outcome="succeeded"))])
    assert spent(goodput) == {"start-up: launch": 2.0, "unknown": 118.0}


def test_giving_up_and_being_stopped() -> None:
    """After the last fault there is no rendezvous to wait for; a run that is told to stop shuts down from that moment."""
    story = [*begin(), beat(20, 11), *fault(20, 11), at(23, ev.RunEnded(outcome="failed"))]
    story[-4] = at(20.5, ev.Decided(action="give up"))
    assert account(story).buckets["shutdown"] == pytest.approx(2 * 1.5)
    stopped = [*begin(), beat(20, 11), at(20.5, ev.Stopping(signal="SIGINT", why="signal")), at(22, ev.Stopped()), at(23, ev.RunEnded())]
    assert spent(account(stopped))["shutdown"] == 5.0


def test_the_last_minutes() -> None:
    """A window shows the newest time alone: a run that starves now does not hide behind a good hour."""
    story = [*begin(), *(beat(10 + 5 * i, 1 + 5 * i) for i in range(1, 720))]
    waited = 0.0
    for i in range(720, 732):  # the last minute
        waited += 2.5
        story.append(beat(10 + 5 * i, 1 + 5 * i, data_wait_s=(waited, waited)))
    goodput = account(story)
    last = {w.seconds: w.time_goodput for w in goodput.windows}
    assert last[60] == pytest.approx(0.5)
    assert last[300] == pytest.approx(0.9)
    assert goodput.time_goodput > 0.98


def test_the_rank_that_the_others_wait_for() -> None:
    """Its lag behind the middle one of its peers, times the ranks it holds up; a few steps, or a small lag, say nothing."""
    beats = [beat(10 + 5 * i, 1 + 5 * i, ranks=3, own_s=(1.0 * i, 3.0 * i, 1.5 * i)) for i in range(1, 9)]
    goodput = account([*begin(slots=(0, 1, 2)), *beats])
    assert goodput.straggling_s == pytest.approx(3 * 7 * (3.0 - 1.25))
    assert goodput.straggler.startswith("local rank 1 is slower")
    few = account([*begin(slots=(0, 1, 2)), *beats[:4]])
    small = [beat(10 + 5 * i, 1 + 5 * i, ranks=3, own_s=(1.0 * i, 1.2 * i, 1.0 * i)) for i in range(1, 9)]
    for untold in (few, account([*begin(slots=(0, 1, 2)), *small])):
        assert (untold.straggler, untold.straggling_s) == ("", 0.0)


# -- whatever the record has lost ------------------------------------------------------------------------------------------


def _random_story(rng: random.Random, node: str) -> Story:
    """A run of one node as launchers write it, with lives, faults, shrinking, waits and reboots drawn at random."""
    story: Story = []
    t, wall0, attempt, step = rng.uniform(0, 1e5), rng.uniform(0, 1e4), -1, 0
    slots = tuple(range(rng.randint(1, 4)))

    def tell(e: ev.Event) -> None:
        story.append(at(round(t, 6), e, attempt, node, wall0))

    for _ in range(rng.randint(1, 3)):
        active = slots
        tell(ev.RunStarted(slots=slots, spares=(9,) if rng.random() < 0.3 else ()))
        for _ in range(rng.randint(1, 4)):
            attempt += 1
            t += rng.expovariate(1)
            tell(ev.AttemptStarted(slots=active))
            t += rng.expovariate(0.2)
            if rng.random() < 0.8:
                step = rng.randint(0, step)
                tell(ev.Restored(step=step))
                marks = {
                    m: t - rng.uniform(-1, 8) for m in ("boot_t", "torch_t", "init_t", "restore_begin_t", "restore_end_t", "first_step_t")
                }
                tell(ev.FirstStep(step=step + 1, **marks))
                waits = [0.0] * len(active)
                for _ in range(rng.randint(0, 8)):
                    t += rng.expovariate(0.2)
                    step += rng.randint(0, 5)
                    waits = [w + rng.expovariate(0.5) * (rng.random() < 0.5) for w in waits]
                    tell(
                        ev.RankProgress(steps=(step,) * len(active), step_t=t - rng.random(), data_wait_s=tuple(waits), eval_s=tuple(waits))
                    )
            if rng.random() < 0.8:
                tell(ev.Failed(step=rng.choice([-1, step]), fault_t=t - rng.expovariate(0.5)))
                if len(active) > 1 and rng.random() < 0.3:
                    active = active[1:]
                tell(ev.Decided(action=rng.choice(["restart", "give up"]), slots=active))
                t += rng.random()
                tell(ev.Stopping(why=rng.choice(["restart", "signal", "end"])))
                tell(ev.Stopped())
        if rng.random() < 0.6:
            tell(ev.RunEnded())
        wall0 += rng.uniform(-500, 500)  # the wall clock was set; the monotonic one may begin anew
        t = rng.choice([t, rng.uniform(0, 100)])
    return story


def _as_lines(story: Story) -> list[bytes]:
    return [json.dumps({"event": e.name, **dataclasses.asdict(e)}).encode() + b"\n" for e in story]


DAMAGE: dict[str, Callable[[random.Random, list[bytes]], list[bytes]]] = {
    "whole": lambda rng, lines: lines,
    "torn": lambda rng, lines: [line[: rng.randrange(len(line))] + b"\n" if rng.random() < 0.2 else line for line in lines],
    "lost": lambda rng, lines: [line for line in lines if rng.random() < 0.8],
    "twice": lambda rng, lines: [line for line in lines for _ in range(1 + (rng.random() < 0.2))],
    "late": lambda rng, lines: [lines[i] for i in sorted(range(len(lines)), key=lambda i: i + 3 * rng.random())],
    "shuffled": lambda rng, lines: rng.sample(lines, len(lines)),
    "clocks": lambda rng, lines: [line.replace(b'"t": ', b'"t": ' + rng.choice([b"", b"", b"9", b"-"]), 1) for line in lines],
}


@pytest.mark.parametrize("kind", DAMAGE)
@given(seed=st.integers(0, 2**32))
def test_every_slot_second_is_booked_once(kind: str, seed: int) -> None:
    """The buckets sum to the time of the clock times the slots after every single event, whatever was torn, lost, doubled or late."""
    rng = random.Random(f"{kind}{seed}")
    story = [e for line in DAMAGE[kind](rng, _as_lines(_random_story(rng, "n1"))) if (e := parse_line(line)) is not None]
    ledgers: dict[str, Ledger] = {}
    for i, e in enumerate(story):
        from goodrun.elastic_runner.goodput.ledger import Ledger

        ledgers.setdefault(e.node, Ledger()).add(e)
        if i % 7 == 0 or i == len(story) - 1:
            goodput = balance(ledgers)
            assert conserved(goodput)
            [ledger] = ledgers.values()
            pieces = ledger.settled().pieces
            assert all(a.end <= b.begin for a, b in pairwise(pieces))
            assert all(sum(p.spent.values()) == p.length * len(p.active) for p in pieces)
            assert sum(p.length for p in pieces) == ledger.newest_us - ledger.between_us
            assert 0 <= goodput.ettr <= goodput.time_goodput <= 1 and 0 <= goodput.capacity_goodput <= 1


@given(seed=st.integers(0, 2**32))
def test_the_order_between_nodes_does_not_matter(seed: int) -> None:
    """Each node has a clock of its own: however their events are mixed, the sum is that of the nodes one by one."""
    rng = random.Random(seed)
    first, second = _random_story(rng, "n1"), _random_story(rng, "n2")
    mixed: Story = []
    a, b = iter(first), iter(second)
    for from_first in rng.sample([True] * len(first) + [False] * len(second), len(first) + len(second)):
        mixed.append(next(a if from_first else b))
    assert account(mixed) == dataclasses.replace(account([*first, *second]))
    assert conserved(account(mixed))


@given(seed=st.integers(0, 2**32))
def test_what_is_redone_was_productive(seed: int) -> None:
    """Relabelling moves time between two buckets and touches no other: without the restores that tell of it, their sum is the same."""
    rng = random.Random(seed)
    story = _random_story(rng, "n1")
    told, untold = account(story), account([dataclasses.replace(e, step=10**9) if isinstance(e, ev.Restored) else e for e in story])
    pair = ("productive", "redone work")
    assert sum(told.buckets[b] for b in pair) == pytest.approx(sum(untold.buckets[b] for b in pair))
    assert {b: s for b, s in told.buckets.items() if b not in pair} == {b: s for b, s in untold.buckets.items() if b not in pair}
    assert told.buckets["redone work"] >= untold.buckets["redone work"]


# -- long records ----------------------------------------------------------------------------------------------------------


def test_a_long_record_is_read_in_part(tmp_path: Path) -> None:
    """Of a record longer than asked for, every k-th progress line gives the same buckets; the newest part is read in full."""
    story, t, step, waited = begin(), 10.0, 1, 0.0
    for attempt in range(3):
        for _ in range(4000):
            t, step, waited = t + 5, step + 5, waited + 0.5
            story.append(beat(t, step, attempt, data_wait_s=(waited, waited)))
        story += [*fault(t + 1, step, attempt), *again(t + 4, attempt + 1, restored=step)]
        t, waited = t + 10, 0.0
    (tmp_path / FILE_NAME).write_bytes(b"".join(_as_lines(story)))
    few = list(read_thinned(tmp_path, progress_lines=1000))
    assert len(few) < 2400
    assert list(read_thinned(tmp_path)) == list(read_events(tmp_path)) == story
    assert few[-500:] == story[-500:]
    whole, part = account(story), account(few)
    assert part.buckets == pytest.approx(whole.buckets, abs=0.01)
    assert set(Bucket) == {Bucket(b) for b in whole.buckets}


@pytest.mark.exhaustive
def test_a_million_events(tmp_path: Path) -> None:
    """A million events of eight ranks, a fault every two thousand, fold in less than 10 s and open in `top` in less than 2 s."""
    more = {"last_step_s": (0.5,) * 8, "silent_s": (0.1,) * 8, "phases": ("step",) * 8}
    slots = tuple(range(8))
    t, step, events = 0.0, 0, 0
    with open(tmp_path / FILE_NAME, "wb") as f:
        f.writelines(_as_lines([at(0, ev.RunStarted(run_id="r", slots=slots))]))
        for attempt in range(500):
            head = [*again(t, attempt, restored=step, slots=slots), *fault(t + 10_010, step, attempt)]
            line = json.dumps({"event": "progress", **dataclasses.asdict(beat(0, 0, attempt, ranks=8, **more))}).encode()
            f.writelines(_as_lines(head[:3]))
            for i in range(1, 2000):
                now = b"%d.0" % (t + 6 + 5 * i)
                steps = b"[" + b", ".join([b"%d" % (step + 5 * i)] * 8) + b"]"
                told = line.replace(b'"t": 0', b'"t": ' + now, 1).replace(b"[0, 0, 0, 0, 0, 0, 0, 0]", steps, 1)
                f.write(told.replace(b'"step_t": 0', b'"step_t": ' + now, 1) + b"\n")
            f.writelines(_as_lines(head[3:]))
            t, step, events = t + 10_020, step + 9_995, events + 2_006
    assert events > 1_000_000
    before = time.process_time()
    goodput = account(read_thinned(tmp_path))
    assert time.process_time() - before < 10
    assert conserved(goodput) and goodput.time_goodput > 0.99
    before = time.process_time()
    board = Board().extend(Follower(tmp_path).so_far())
    assert (board.history.restarts, board.step >= 0) == (499, True)
    assert time.process_time() - before < 2
