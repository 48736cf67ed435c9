"""Which snapshot nodes restore from each other's memories."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodrun.checkpoint.fence import Token
from goodrun.checkpoint.neighbours import Held, choose
from goodrun.checkpoint.store import _rank_of_memory

OLD, NEW = Token(1, 0), Token(1, 1)


def held(step, *ranks, world=3, token=OLD, number=1):
    return Held(step, token, number, world, ranks)


def test_the_newest_of_which_every_part_is_somewhere():
    """Node one has ranks 0 and 1 of today, node two has rank 2; each told twice is told once."""
    one, two = [held(20, 0, 1), held(10, 0, 1)], [held(20, 2), held(10, 2)]
    assert choose([one, one, two]) == ((20, OLD, 1), {0: 0, 1: 0, 2: 2})


def test_one_whose_parts_went_with_a_node_is_passed_over():
    """Rank 2 of then was on a lost node for step 20; of step 10 it is all there."""
    assert choose([[held(20, 0, 1), held(10, 0, 1)], [held(10, 2)]]) == ((10, OLD, 1), {0: 0, 1: 0, 2: 1})
    assert choose([[held(20, 0, 1)], []]) is None
    assert choose([]) is None


def test_the_same_step_of_two_attempts_is_not_put_together():
    """Nor two snapshots of one attempt that have only the step in common."""
    assert choose([[held(20, 0, 1)], [held(20, 2, token=NEW)]]) is None
    assert choose([[held(20, 0, 1)], [held(20, 2, number=2)]]) is None


@given(st.lists(st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 2))), max_size=3), max_size=4))
def test_whatever_is_chosen_is_there(nodes):
    """Each part comes from a rank whose node has it, and nothing newer could have been had."""
    told = [[held(step, *sorted(ranks)) for step, ranks in node] for node in nodes]
    whole = [s for s in (1, 2, 3) if set().union(*(h.ranks for node in told for h in node if h.step == s)) == {0, 1, 2}]
    chosen = choose(told)
    assert (chosen is None) == (not whole)
    if chosen is not None:
        (step, _, _), holders = chosen
        assert step == whole[-1]
        assert all(any(h.step == step and part in h.ranks for h in told[rank]) for part, rank in holders.items())


@pytest.mark.parametrize(
    ("stored", "before"),
    [
        ([("step-15.g1-abc", (15, 7, 1)), ("step-10.g0-ddd", (10, 7, 0))], 0),  # the same, written by this attempt while it looked
        ([("step-15.g1-eee", (15, 7, 1)), ("step-10.g0-ddd", (10, 7, 0))], 1),  # another one of that step, and newer
        ([("step-20.g1-fff", (20, 7, 1)), ("step-15.g1-abc", (15, 7, 1))], 1),
        ([], 0),
    ],
)
def test_what_is_in_memory_is_read_there_though_storage_has_it_by_now(stored, before):
    """Nodes that go on from an older attempt's snapshot may have written it, in the name of theirs, before rank 0 looks at storage."""
    recent = SimpleNamespace(step=15, started=7, generation=0, path=Path("step-15.g1-abc"))
    found = [SimpleNamespace(path=Path(name), age=age) for name, age in stored]
    assert _rank_of_memory(recent, found, None, 7) == before
