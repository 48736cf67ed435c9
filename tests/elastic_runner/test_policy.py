"""Every rule of the decider, as tables over failures: no process, no clock."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from goodrun.elastic_runner import policy
from goodrun.elastic_runner.policy import Budgets, Do, Failure, Kind, Slots, decide, grow

FOUR = Slots(active=(0, 1, 2, 3))
TWO = Slots(active=(0, 1), min_nproc=2)


def kill(t=0.0, slot=1, step=5, **more):
    return Failure(t=t, kind=Kind.SIGNAL, slot=slot, rank=slot, step=step, **more)


def hang(t=0.0, slot=1, step=5, **more):
    return Failure(t=t, kind=Kind.HANG, slot=slot, rank=slot, step=step, **more)


def crash(step=5, message="ValueError: no rows", **more):
    return Failure(t=0.0, kind=Kind.EXCEPTION, slot=0, rank=0, step=step, message=message, **more)


def lost(slot=3):
    return Failure(t=0.0, kind=Kind.SLOT_LOST, slot=slot, rank=slot, step=5)


LEFT = Failure(t=0.0, kind=Kind.LEFT, slot=1, rank=1, step=5)
PEER = Failure(t=0.0, kind=Kind.PEER, slot=-1, rank=-1)


@pytest.mark.parametrize(
    ("failures", "do", "words"),
    [
        pytest.param([kill()], Do.RESTART, "strike 1 for slot 1", id="a kill restarts"),
        pytest.param([kill(), kill()], Do.RESTART, "rank 1 failed after step 5 for the second time", id="a repeated step is told"),
        pytest.param([crash(None, started=False)], Do.RESTART, "first failed start", id="a failed start is tried again"),
        pytest.param([crash(None, started=False)] * 2, Do.GIVE_UP, "could not start, 2 times", id="a second failed start ends it"),
        pytest.param([crash(None, started=False), kill(), crash(None, started=False)], Do.RESTART, "first failed start", id="not in a row"),
        pytest.param([crash(5)], Do.RESTART, "first crash at this step", id="a crash restarts"),
        pytest.param([crash(5), crash(5)], Do.GIVE_UP, "crashed after step 5 again", id="the same step twice ends it"),
        pytest.param([crash(5), crash(6)], Do.RESTART, "first crash at this step", id="another step is a new crash"),
        pytest.param([crash(5), crash(6), crash(5)], Do.RESTART, "first crash", id="the same step, but not in a row"),
        pytest.param([crash(5), kill(), crash(5)], Do.RESTART, "first crash", id="a kill lies between the two crashes"),
        pytest.param([crash(5, "ValueError: a"), crash(5, "KeyError: b")], Do.GIVE_UP, "step 5 again", id="the step counts, not the words"),
        pytest.param([crash(None)] * 2, Do.RESTART, "", id="no steps to be seen: twice is borne"),
        pytest.param([crash(None)] * 3, Do.GIVE_UP, "same exception 3 times", id="no steps to be seen: the third same exception ends it"),
        pytest.param([crash(None, "a"), crash(None, "b"), crash(None, "a")], Do.RESTART, "", id="no steps, exceptions differ"),
        pytest.param([crash(None, "a"), crash(None, "b")] * 5, Do.GIVE_UP, "10 failures in a row", id="no steps, it never gets anywhere"),
        pytest.param([LEFT], Do.GIVE_UP, "rank 1 ended with 0", id="a rank that left early is the script's doing"),
        pytest.param([PEER], Do.RESTART, "another node", id="another node's failure restarts"),
    ],
)
def test_answer_without_any_loss_of_slots(failures, do, words):
    """The budgets of exceptions, kills, early leavers and peers: consecutive failures, told in the reason."""
    action = decide(failures, FOUR, Budgets(), restarts=len(failures) - 1)
    assert action.do is do
    assert words in action.reason
    assert action.slots == FOUR


@pytest.mark.parametrize(
    ("failures", "struck_out"),
    [
        pytest.param([kill(step=1), kill(step=2), kill(step=3)], True, id="three in a row"),
        pytest.param([kill(step=1), kill(step=2)], False, id="two"),
        pytest.param([kill(step=1), kill(step=2), kill(slot=2, step=3), kill(step=4)], False, id="another slot between"),
        pytest.param([kill(step=1), crash(2), kill(step=3), kill(step=4)], False, id="an exception between"),
        pytest.param([kill(t=0, step=1), kill(t=300, step=2), kill(t=601, step=3)], False, id="the first is out of the window"),
        pytest.param([kill(t=0, step=1), kill(t=300, step=2), kill(t=600, step=3)], True, id="the first is just within the window"),
        pytest.param([hang(step=1), kill(step=2), hang(step=3)], True, id="hangs and kills alike"),
        pytest.param([crash(1), crash(2), crash(3)], False, id="exceptions never blame the slot"),
    ],
)
def test_a_slot_is_left_out_after_three_strikes(failures, struck_out):
    """Three attempts in a row first failed by one slot within ten minutes: it is left out, and only then."""
    action = decide(failures, FOUR, Budgets(), restarts=0)
    if struck_out:
        assert action.do is Do.RESTART_WITHOUT
        assert action.slots.active == (0, 2, 3)
        assert action.slots.out == ((1, "3 failures in a row"),)
        assert action.reason == "slot 1 failed 3 times in a row: going on with 3 of 4"
    else:
        assert action.do is Do.RESTART
        assert action.slots == FOUR


@pytest.mark.parametrize(
    ("slots", "failures", "after", "reason"),
    [
        pytest.param(
            FOUR, [lost(3)], Slots(active=(0, 1, 2), out=((3, "slot 3 is lost"),)), "slot 3 is lost: going on with 3 of 4", id="4→3"
        ),
        pytest.param(
            Slots(active=(0, 1, 2, 3), spare=(4, 5)),
            [lost(1)],
            Slots(active=(0, 4, 2, 3), spare=(5,), out=((1, "slot 1 is lost"),)),
            "slot 1 is lost: spare slot 4 takes its place",
            id="a spare takes the place, at the same rank",
        ),
        pytest.param(
            Slots(active=(0, 1), spare=(2,), min_nproc=2),
            [kill(step=1), kill(step=2), kill(step=3)],
            Slots(active=(0, 2), min_nproc=2, out=((1, "3 failures in a row"),)),
            "slot 1 failed 3 times in a row: spare slot 2 takes its place",
            id="with a spare even a fixed size strikes out",
        ),
        pytest.param(
            Slots(active=(0, 1, 2, 3), multiple_of=2, min_nproc=2),
            [lost(3)],
            Slots(active=(0, 1), spare=(2,), multiple_of=2, min_nproc=2, out=((3, "slot 3 is lost"),)),
            "slot 3 is lost: going on with 2 of 4",
            id="multiples of 2: what is over waits in reserve",
        ),
        pytest.param(
            Slots(active=(0, 1), spare=(2,), multiple_of=2, min_nproc=2, out=((3, "slot 3 is lost"),)),
            [lost(0)],
            Slots(active=(2, 1), multiple_of=2, min_nproc=2, out=((3, "slot 3 is lost"), (0, "slot 0 is lost"))),
            "slot 0 is lost: spare slot 2 takes its place",
            id="the one in reserve is used next",
        ),
    ],
)
def test_which_slots_go_on(slots, failures, after, reason):
    """A lost or struck-out slot is replaced by a spare if there is one, else the job shrinks to what is allowed."""
    action = decide(failures, slots, Budgets(), restarts=0)
    assert action.do is Do.RESTART_WITHOUT
    assert action.slots == after
    assert action.reason == reason


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(Slots(active=(0, 1), min_nproc=2), id="--min-nproc"),
        pytest.param(Slots(active=(0, 1), multiple_of=2), id="--world-size-multiple-of"),
        pytest.param(Slots(active=(1,)), id="the last slot"),
    ],
)
def test_a_lost_slot_at_the_minimum_ends_the_job(slots):
    """Where too few would remain, the reason names the slot and both flags that bound the size, and nothing changes."""
    action = decide([lost(1)], slots, Budgets(), restarts=0)
    assert action.do is Do.GIVE_UP
    assert action.slots == slots
    for word in ("slot 1 is lost", f"--min-nproc {slots.min_nproc}", f"--world-size-multiple-of {slots.multiple_of}"):
        assert word in action.reason


@pytest.mark.parametrize(
    ("count", "do"),
    [(3, Do.RESTART), (9, Do.RESTART), (10, Do.GIVE_UP)],
)
def test_a_size_that_may_not_shrink_is_tried_until_nothing_moves(count, do):
    """--min-nproc = nproc forbids leaving the slot out: restarts go on, but not for ever without a new step."""
    action = decide([kill(t=float(i)) for i in range(count)], TWO, Budgets(), restarts=count - 1)
    assert action.do is do
    assert action.slots == TWO


@pytest.mark.parametrize(
    ("failures", "do"),
    [
        pytest.param([hang(slot=i % 2) for i in range(4)], Do.RESTART, id="four"),
        pytest.param([hang(slot=i % 2) for i in range(5)], Do.GIVE_UP, id="five"),
        pytest.param([hang(slot=i % 2) for i in range(4)] + [hang(step=6)], Do.RESTART, id="a new step resets"),
        pytest.param([hang(slot=i % 2) for i in range(4)] + [kill(slot=0), hang()], Do.RESTART, id="a kill between"),
    ],
)
def test_hangs_without_progress_end_the_job(failures, do):
    """A detector may restart five times in a row without a new step, not more: it may be the detector that is wrong."""
    assert decide(failures, TWO, Budgets(), restarts=0).do is do


@pytest.mark.parametrize(
    ("steps", "do"),
    [
        pytest.param([5] * 10, Do.GIVE_UP, id="no progress"),
        pytest.param([None] * 10, Do.GIVE_UP, id="no steps to be seen"),
        pytest.param([5] * 9 + [6], Do.RESTART, id="progress at the last"),
        pytest.param([5] + [6] * 9, Do.RESTART, id="nine since the best"),
        pytest.param([5] + [6] * 10, Do.GIVE_UP, id="ten since the best"),
        pytest.param([50, 7, 8, 9, 10, 11, 12, 13, 14, 15], Do.GIVE_UP, id="steps below the best are none"),
        pytest.param(list(range(1, 40)), Do.RESTART, id="slow, but it moves"),
    ],
)
def test_failures_without_progress_end_the_job(steps, do):
    """Ten failures of the infrastructure without a new best step between them are the end; each new best starts the count anew."""
    failures = [kill(slot=i % 2, step=s) for i, s in enumerate(steps)]
    assert decide(failures, TWO, Budgets(), restarts=len(steps) - 1).do is do


@pytest.mark.parametrize(
    ("cap", "restarts", "failure", "do"),
    [
        (None, 1000, kill(), Do.RESTART),
        (0, 0, kill(), Do.GIVE_UP),
        (0, 0, lost(), Do.GIVE_UP),
        (0, 0, hang(), Do.GIVE_UP),
        (0, 0, PEER, Do.RESTART),
        (1, 0, kill(), Do.RESTART),
        (1, 1, kill(), Do.GIVE_UP),
        (1, 7, PEER, Do.RESTART),
    ],
)
def test_the_users_cap(cap, restarts, failure, do):
    """--max-restarts caps every kind but what another node did, and is named in the reason."""
    action = decide([failure], FOUR, Budgets(max_restarts=cap), restarts)
    assert action.do is do
    assert (f"--max-restarts {cap} is used up" in action.reason) is (do is Do.GIVE_UP)


def test_every_answer_leaves_a_lawful_size():
    """Slots are lost one by one: the size stays lawful until the job ends, and no slot comes back or goes missing."""
    slots = Slots(active=(0, 1, 2, 3), spare=(4, 5), min_nproc=2, multiple_of=2)
    sizes = []
    while (action := decide([lost(slots.active[0])], slots, Budgets(), restarts=0)).do is not Do.GIVE_UP:
        slots = action.slots
        sizes.append(len(slots.active))
        assert len(slots.active) % 2 == 0 and len(slots.active) >= 2
        everyone = [*slots.active, *slots.spare, *(s for s, _ in slots.out)]
        assert sorted(everyone) == list(range(6))
    assert sizes == [4, 4, 2, 2]


def test_policy_is_pure():
    """The decider imports neither torch, os, time nor any other door to the outside."""
    tree = ast.parse(Path(policy.__file__).read_text())
    names = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "collections.abc", "dataclasses", "enum"}


def test_a_script_that_does_not_number_its_steps_is_believed_to_make_progress():
    """Its own resume may go on anywhere: attempts that did some steps are no failures in a row, but not for ever."""
    failures = [Failure(t=1000.0 * n, kind=Kind.SIGNAL, slot=n % 2, rank=n % 2, unnumbered=20) for n in range(99)]
    assert decide(failures, TWO, Budgets(), 98).do is Do.RESTART
    assert decide([*failures, replace(failures[0], t=1e6)], TWO, Budgets(), 99).do is Do.GIVE_UP


def test_a_lost_connection_blames_nobody():
    """Another node's failure is no strike and no crash of the script, but it does not go on for ever either."""
    failures = [Failure(t=float(n), kind=Kind.CONNECTION, slot=1, rank=1, step=7) for n in range(10)]
    assert decide(failures[:9], TWO, Budgets(), 8).do is Do.RESTART
    assert decide(failures, TWO, Budgets(), 9).do is Do.GIVE_UP


def test_a_sick_node_ends_the_job_and_a_device_that_asks_for_it_restarts():
    """No device of the node may be used: nothing to restart with. A device that only wants the script anew keeps its slot."""
    sick, asks = (Failure(t=0.0, kind=kind, slot=1, rank=1, step=5) for kind in (Kind.NODE_SICK, Kind.DEVICE))
    assert decide([sick], FOUR, Budgets(), 0).do is Do.GIVE_UP
    action = decide([asks], FOUR, Budgets(), 0)
    assert (action.do, action.slots) == (Do.RESTART, FOUR)
    assert decide([asks] * 10, FOUR, Budgets(), 9).do is Do.GIVE_UP


@pytest.mark.parametrize(
    ("slots", "back", "do", "active", "spare"),
    [
        pytest.param(Slots(active=(0, 1, 3), out=((2, "lost"),)), (2,), Do.GROW, (0, 1, 2, 3), (), id="back in its old place"),
        pytest.param(Slots(active=(0, 1), out=((2, ""), (3, ""))), (3,), Do.GROW, (0, 1, 3), (), id="one of two"),
        pytest.param(Slots(active=(0, 1, 4, 3), out=((2, ""),)), (2,), Do.CONTINUE, (0, 1, 4, 3), (2,), id="a spare has its place"),
        pytest.param(
            Slots(active=(0, 1), spare=(3,), multiple_of=2, out=((2, ""),)), (2,), Do.GROW, (0, 1, 2, 3), (), id="a multiple is whole again"
        ),
        pytest.param(Slots(active=(0, 1), multiple_of=2, out=((2, ""), (3, ""))), (2,), Do.CONTINUE, (0, 1), (2,), id="not yet a multiple"),
    ],
)
def test_a_slot_that_is_well_again_comes_back(slots, back, do, active, spare):
    """It takes its old place if the job may be larger with it, else it waits in reserve; nobody is in two places, and it is out no more."""
    action = grow(slots, back, 4)
    assert (action.do, action.slots.active, action.slots.spare) == (do, active, spare)
    assert not {s for s, _ in action.slots.out} & set(back)


def test_a_spare_that_falls_sick_is_left_out_of_the_reserve():
    """A sick spare shrinks the reserve alone."""
    after = Slots(active=(0, 1), spare=(2, 3)).without(2, "sick")
    assert after is not None
    assert (after.active, after.spare, after.out) == ((0, 1), (3,), ((2, "sick"),))
