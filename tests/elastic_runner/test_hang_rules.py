"""The rules by which a hang is told from work, over a simulated clock: a look every 0.2 s at pages and signs made up here."""

import os
from dataclasses import dataclass, field, replace

import pytest

from goodrun.elastic_runner.hang import HangDetector, Limits, culprit, in_collective
from goodrun.elastic_runner.processes import Signs
from goodrun.progress import Page, Phase, Progress

LOOK_S = 0.2
BEGIN = 1000.0


def page(t=BEGIN, **changes) -> Progress:
    """A rank in the middle of training with steps of 0.2 s, last heard of at `t`."""
    fresh, fd = Page.create()
    os.close(fd)
    blank = fresh.read()
    fresh.close()
    return replace(blank, **{"t": t, "step": 20, "steps_done": 20, "phase": Phase.STEP, "longest_step_s": 0.2, "seq": 40, **changes})


STILL = Signs(state="S", cpu_s=10.0, switches=100, io_bytes=1000)


@dataclass
class World:
    """Ranks whose pages and signs the test sets; `work` says what grows from look to look."""

    pages: dict[int, Progress]
    detector: HangDetector = field(default_factory=HangDetector)
    work: dict[int, dict] = field(default_factory=dict)
    now: float = BEGIN
    signs: dict[int, Signs] = field(default_factory=dict)

    def look(self, seconds=LOOK_S):
        """One look, `seconds` after the last."""
        self.now += seconds
        for rank in self.pages:
            signs = self.signs.get(rank, STILL)
            grown = {k: v if isinstance(v, str) else getattr(signs, k) + v for k, v in self.work.get(rank, {}).items()}
            self.signs[rank] = replace(signs, **grown)
        return self.detector.look(self.now, {r: (p, self.signs[r]) for r, p in self.pages.items()})

    def until(self, seconds):
        """Look for that long; the first suspicion and when it was raised, after BEGIN."""
        while self.now < BEGIN + seconds:
            if (found := self.look()) is not None:
                return found, round(self.now - BEGIN, 3)
        return None, None


def test_a_stopped_rank_is_named_at_the_second_look():
    """State T is evidence by itself, but a single look may have caught a debugger's or a signal's blink."""
    w = World({0: page(), 1: page()})
    w.signs[1] = replace(STILL, state="T")
    assert w.look() is None
    found = w.look()
    assert found.ranks == (1,)
    assert found.evidence == ("stopped (state T)",)
    assert found.silent_s == pytest.approx(2 * LOOK_S)


def test_a_blink_of_state_t_is_forgotten():
    """Two looks in a row are needed: T, S, T is no stop."""
    w = World({0: page(), 1: page()})
    for state in "TSTST":
        w.signs[1] = replace(STILL, state=state)
        w.pages[0] = page(t=w.now)
        assert w.look() is None


def test_a_script_that_never_beat_can_still_be_seen_to_be_stopped():
    """A stop needs no page."""
    w = World({0: page(t=0.0, steps_done=0, step=-1, longest_step_s=0.0, phase=Phase.START)})
    w.signs[0] = replace(STILL, state="T")
    w.look()
    assert w.look().ranks == (0,)


def test_silent_and_still_ranks_are_suspected_in_time():
    """With steps of 0.2 s and all still, suspicion comes after 2.5 steps + 0.5 s and before 3 steps + 1 s, of all of them."""
    found, after = World({0: page(), 1: page()}).until(10)
    assert found.ranks == (0, 1)
    assert 2.5 * 0.2 + 0.5 <= after <= 3 * 0.2 + 1
    assert found.evidence == (f"no beat for {after:.1f} s, longest step 0.20 s", "no sign of work")


@pytest.mark.parametrize("longest", [0.05, 0.2, 1.0, 7.0])
def test_the_limit_grows_with_the_runs_own_steps(longest):
    """Suspicion lies between 2.5 × the longest step of any rank and 3 × it + 1 s, whatever the step's length."""
    found, after = World({0: page(longest_step_s=longest), 1: page(longest_step_s=longest / 10)}).until(40)
    assert found is not None
    assert 2.5 * longest <= after <= 3 * longest + 1 + LOOK_S


@pytest.mark.parametrize(
    "work",
    [{"cpu_s": 0.01}, {"io_bytes": 4096}, {"switches": 1}, {"state": "R"}, {"state": "D"}],
    ids=lambda w: next(iter(w)) + str(w.get("state", "")),
)
def test_a_rank_at_work_is_never_suspected(work):
    """CPU time, bytes moved, a scheduled main thread, running or waiting on the disk: each is work; only the still are looked at."""
    found, _ = World({0: page(), 1: page()}, work={1: work}).until(60)
    assert found.ranks == (0,)


def test_what_idle_threads_use_is_no_work():
    """gloo's threads look around a hundred times a second, and cost a tick of CPU time every other second: a hang is found all the same."""
    w = World({0: page(step=40), 1: page(step=40)})
    ticks = {5: 0.01, 13: 0.01, 19: 0.01, 31: 0.01}
    w.signs = {0: STILL, 1: STILL}
    found = None
    for look in range(40):
        w.work = {rank: {"cpu_s": ticks.get(look, 0.0)} for rank in (0, 1)}
        found = found or w.look()
    assert found.ranks == (0, 1)


@pytest.mark.parametrize("work", [{"cpu_s": 0.01}, {"io_bytes": 1}, {"switches": 1}, {"state": "R"}, {"state": "D"}])
def test_ranks_that_all_work_are_left_alone(work):
    """Nobody is still: no suspicion before the long limit for busy ranks."""
    assert World({0: page(), 1: page()}, work={0: work, 1: work}).until(120) == (None, None)


def test_ranks_that_only_spin_are_suspected_in_the_end():
    """All work and none beats: after `busy_s` they are looked at all the same."""
    w = World({0: page(), 1: page()}, HangDetector(limits=Limits(busy_s=20)), work={0: {"cpu_s": 0.2}, 1: {"cpu_s": 0.2}})
    found, after = w.until(60)
    assert found.ranks == (0, 1)
    assert 20 <= after < 21
    assert found.evidence == (f"no beat for {after:.0f} s",)


def test_a_rank_that_spins_while_its_peers_wait_is_found_in_the_end():
    """One rank loops without a beat, the others wait for it, still: after `busy_s` it is among the suspects."""
    w = World({0: page(), 1: page()}, HangDetector(limits=Limits(busy_s=20)), work={1: {"cpu_s": 0.2}})
    while w.now < BEGIN + 60:
        found = w.look()
        if found is not None and 1 in found.ranks:
            return
        if found is not None:  # the still one only waits in a collective
            w.detector.cleared(w.now, found.silent_s)
    raise AssertionError("rank 1 was never suspected")


def test_stillness_must_last():
    """Silence alone is not enough: a rank must have been still for most of it, not just between two looks at a file."""
    w = World({0: page()}, work={0: {"cpu_s": 0.1}})
    assert w.until(5) == (None, None)
    w.work.clear()
    found, after = w.until(60)
    assert found.ranks == (0,)
    assert 5 / 0.3 < after < 5 / 0.3 + 1  # still for 70 % of its silence


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.RESTORE, Phase.EVAL, Phase.IDLE])
def test_an_announced_phase_clears_all(phase):
    """One rank saves, restores or evaluates: for half an hour the others may wait for it, still and silent."""
    w = World({0: page(), 1: page(phase=phase)})
    assert w.until(200) == (None, None)
    w = World({0: page(), 1: page(phase=phase)}, HangDetector(limits=Limits(announced_s=20)))
    found, after = w.until(60)
    assert found.ranks == (0, 1)
    assert 20 <= after < 20.5


def test_data_has_the_longer_limit():
    """Inside a DataLoader fetch 20 steps + 30 s are borne: storage has bad minutes."""
    found, after = World({0: page(), 1: page(phase=Phase.DATA)}).until(60)
    assert found.ranks == (0, 1)
    assert 34 <= after < 34.5


def test_one_rank_that_beats_clears_all():
    """While any rank is within its limit, the others may be waiting for it."""
    w = World({0: page(), 1: page()})
    for _ in range(300):
        assert w.look() is None
        w.pages[1] = replace(w.pages[1], t=w.now)


def test_a_script_without_beats_is_never_suspected():
    """No optimizer, no heartbeat, nothing known of starts: silence means nothing."""
    silent = page(t=BEGIN, steps_done=0, step=-1, longest_step_s=0.0, phase=Phase.START)
    assert World({0: silent, 1: silent}).until(2000) == (None, None)


@pytest.mark.parametrize(("known", "limit"), [(0.0, None), (2.0, 16.0), (20.0, 70.0)])
def test_a_start_is_judged_once_one_is_known(known, limit):
    """An attempt without a step is judged by the slowest start so far: three of them and 10 s; before, not at all."""
    starting = page(steps_done=0, step=-1, longest_step_s=0.0, phase=Phase.START)
    found, after = World({0: starting, 1: starting}, HangDetector(known_start_s=known)).until(200)
    assert (found is None) is (limit is None)
    if limit is not None:
        assert limit <= after < limit + 0.5


def test_a_rank_behind_in_its_first_steps_is_given_a_starts_time():
    """One rank is past its start, the other compiles: `start_s` is borne while no start is known."""
    w = World({0: page(), 1: page(steps_done=0, step=-1, longest_step_s=0.0, phase=Phase.START)}, HangDetector(limits=Limits(start_s=25)))
    found, after = w.until(60)
    assert found.ranks == (0, 1)
    assert 25 <= after < 25.5


@pytest.mark.parametrize("steps", [1, 2])
def test_the_first_steps_teach_nothing(steps):
    """Below three steps the longest is not yet known: the limit of a start holds."""
    assert World({0: page(steps_done=steps)}, HangDetector(limits=Limits(start_s=50))).until(49) == (None, None)


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_gap_between_looks_makes_old_evidence_worthless(state):
    """We were suspended with the ranks, or the machine was: after a gap of more than a second all has to be seen anew."""
    w = World({0: page(), 1: page()})
    w.signs[1] = replace(STILL, state=state)
    w.look()
    assert w.look(30.0) is None
    if state == "T":
        assert w.look() is not None  # seen twice again
    else:
        assert w.until(60) == (None, None)  # not still for most of the silence that we have slept through ourselves


def test_a_suspicion_that_came_to_nothing_holds_off_the_next():
    """After `cleared` no other is raised until the silence has lasted half as long again."""
    w = World({0: page(), 1: page()}, work={1: {"cpu_s": 0.1}})
    found, first = w.until(10)
    w.detector.cleared(w.now, found.silent_s)
    _, second = w.until(20)
    assert first + found.silent_s / 2 <= second <= first + found.silent_s / 2 + 2 * LOOK_S


def test_holding_off_does_not_hide_a_stopped_rank():
    """What `cleared` holds off is judgement by silence; a stop is a stop."""
    w = World({0: page(), 1: page()})
    w.look()
    w.detector.cleared(w.now, 1000.0)
    w.signs[1] = replace(STILL, state="T")
    w.look()
    assert w.look().ranks == (1,)


def test_a_rank_that_has_ended_is_not_judged():
    """Only living ranks are looked at: what was seen of one that ended is not held against it."""
    w = World({0: page(), 1: page()})
    w.signs[1] = replace(STILL, state="T")
    w.look()
    del w.pages[1]
    w.pages[0] = replace(w.pages[0], t=w.now)
    assert w.look() is None


def test_how_long_ranks_have_been_calm():
    """`calm_for` counts from the last sign of work of any of the ranks asked for."""
    w = World({0: page(), 1: page()}, work={1: {"cpu_s": 0.1}})
    for _ in range(10):
        w.pages = {r: replace(p, t=w.now + LOOK_S) for r, p in w.pages.items()}
        w.look()
    assert w.detector.calm_for((0,)) == pytest.approx(9 * LOOK_S)
    assert w.detector.calm_for((0, 1)) == 0


@pytest.mark.parametrize(
    ("changes", "known", "limit"),
    [
        ({}, 0.0, 2.5 * 0.2 + 0.5),
        ({"phase": Phase.DATA}, 0.0, 20 * 0.2 + 30),
        ({"phase": Phase.EVAL}, 0.0, 1800),
        ({"phase": Phase.SAVE, "steps_done": 0}, 5.0, 1800),
        ({"steps_done": 2}, 0.0, 300),
        ({"steps_done": 2}, 5.0, 25),
        ({"steps_done": 2, "phase": Phase.DATA}, 5.0, 25),
    ],
)
def test_limits(changes, known, limit):
    """Each phase has its limit; before three steps it is the start's."""
    assert Limits().of(page(**changes), 0.2, known) == pytest.approx(limit)


TORCH = 'File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce'
WRAPPER = 'File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper'
BACKWARD = 'File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward'
DDP = 'File "/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 2363 in _distributed_broadcast_coalesced'
ITEM = 'File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 1044 in __float__'
USER = 'File "/home/me/train.py", line 12 in main'
READ = 'File "/home/me/data.py", line 3 in read'


@pytest.mark.parametrize(
    ("stack", "answer"),
    [
        ((TORCH, WRAPPER, USER), True),
        ((BACKWARD, ITEM, USER), True),
        ((DDP, DDP, USER), True),
        ((ITEM, DDP, USER), False),  # the forward pass of a model in DDP
        ((USER,), False),
        ((READ, USER), False),
        ((READ, TORCH, USER), False),  # a hook of the user's, called from within torch
        ((ITEM, USER), False),
        ((ITEM, *[USER] * 8, TORCH), False),  # far away
        ((), False),
    ],
)
def test_what_stands_in_a_collective(stack, answer):
    """The innermost frame is torch's, and a collective or the backward pass is near."""
    assert in_collective(stack) is answer


WAITS, SLEEPS = (TORCH, WRAPPER, USER), (READ, USER)


@pytest.mark.parametrize(
    ("suspects", "pages", "stacks", "whole_job", "rank", "why"),
    [
        pytest.param((0, 1), {0: {}, 1: {}}, {0: WAITS, 1: SLEEPS}, True, 1, "peers wait for it in a collective", id="the one apart"),
        pytest.param((0, 1), {0: {}, 1: {}}, {0: WAITS, 1: SLEEPS}, False, 1, "peers wait for it", id="the one apart, of several nodes"),
        pytest.param((0,), {0: {}, 1: {}}, {0: WAITS, 1: SLEEPS}, True, None, "", id="its peer works: the still one waits for it"),
        pytest.param((0, 1), {0: {}, 1: {}, 2: {}}, {0: WAITS, 1: WAITS, 2: SLEEPS}, True, None, "", id="the third rank works"),
        pytest.param((0, 1), {0: {}, 1: {}}, {0: WAITS, 1: WAITS}, False, None, "", id="all wait, maybe for another node"),
        pytest.param((0, 1), {0: {}, 1: {"step": 19}}, {0: WAITS, 1: WAITS}, True, 1, "furthest behind", id="all wait: the one behind"),
        pytest.param(
            (0, 1, 2), {0: {}, 1: {"step": 19}, 2: {"step": 18}}, {0: WAITS, 1: SLEEPS, 2: SLEEPS}, True, 2, "peers wait", id="lowest step"
        ),
        pytest.param(
            (0, 1, 2), {0: {}, 1: {"t": 990.0}, 2: {"t": 995.0}}, {0: WAITS, 1: SLEEPS, 2: SLEEPS}, True, 1, "peers", id="silent longest"
        ),
        pytest.param((0, 1), {0: {}, 1: {}}, {0: SLEEPS, 1: SLEEPS}, True, 0, "outside any collective", id="nobody waits in a collective"),
        pytest.param((0,), {0: {}}, {0: SLEEPS}, True, 0, "outside any collective", id="a job of one"),
        pytest.param((0, 1), {0: {}, 1: {}}, {0: WAITS, 1: ()}, True, 1, "gives no stack", id="no stack, and all others wait"),
        pytest.param((0, 1), {0: {}, 1: {"step": 19}}, {0: (), 1: ()}, True, 1, "furthest behind", id="no stack at all proves nothing"),
        pytest.param((0, 1), {0: {"step": 19}, 1: {}}, {}, True, 0, "furthest behind", id="no stacks at all"),
    ],
)
def test_which_rank_is_named(suspects, pages, stacks, whole_job, rank, why):
    """The rank that is not in a collective keeps the others waiting; a rank at work outside the suspects clears those that wait."""
    found = culprit(suspects, {r: page(**changes) for r, changes in pages.items()}, stacks, whole_job)
    assert (found[0] if found else None) == rank
    assert why in (found[1] if found else "")


def test_a_still_rank_is_not_blamed_while_another_works_outside_collectives():
    """Rank 0 evaluates, rank 1 waits for it by looking at a file: nobody hangs."""
    waits, works = ('File "/job/train.py", line 9 in wait',), ('File "/job/train.py", line 3 in evaluate',)
    pages = {0: page(), 1: page()}
    assert culprit((1,), pages, {0: works, 1: waits}, True) is None


def test_after_the_first_rank_has_ended_silence_is_no_evidence():
    """What a rank does after the last step takes as long as it takes; only state T still counts."""
    d = HangDetector()
    for n in range(100):
        assert d.look(BEGIN + n * LOOK_S, {1: (page(), STILL)}, finishing=True) is None
