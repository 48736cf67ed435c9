"""A loss that is not finite: back to the last good checkpoint, once more on other devices, and then a word on whose fault it is."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.replicas import Replicas
from goodrun.elastic_runner.bad_numbers import NumbersWatch
from goodrun.elastic_runner.events import AttemptStarted, Decided, Failed, Notice, Restored, RunEnded
from goodrun.elastic_runner.policy import Budgets, Do, Failure, Kind, Slots, decide
from goodrun.progress import Page


@pytest.mark.parametrize("who", ["one", "all"])
def test_numbers_that_went_bad_once_are_the_devices_fault(job, who):
    """The job goes back before the bad step, past newer checkpoints, replays with the ranks on other slots, and ends with good weights.

    The rank that alone had a bad loss gives its slot a strike. The bad checkpoints are marked: no later run restores them either.
    """
    j = job("--nproc-per-node", 2, "bad_loss.py", "once", who).ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.step, failed.slot) == ("numbers", 7, 1 if who == "one" else -1)
    assert [a.slots for a in j.events(AttemptStarted)] == [(0, 1), (1, 0)]
    assert j.events(Restored)[0].step == 4  # step 6 was followed by no finite loss: it may be what made it bad
    assert {(j.where / f"finite.{r}").read_text() for r in (0, 1)} == {"True"}
    said = "\n".join(n.text for n in j.events(Notice))
    assert "the loss of step 7 is finite now" in said
    assert ("slot 1 is suspected" in said) is (who == "one")
    marked = {f.step for f in found_in(j.where / "checkpoints") if f.manifest is None and "not trusted" in (f.fault or "")}
    assert 6 in marked and not marked & {2, 4}


def test_a_good_checkpoint_outlives_those_of_bad_numbers_that_are_not_noticed_yet(job):
    """The loss is said every fifth step, one checkpoint is kept, and two were committed between the corruption and the word of it."""
    j = job("--nproc-per-node", 2, "bad_loss.py", "once", "one", 5).ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.step) == ("numbers", 10)
    assert j.events(Restored)[0].step == 4  # the loss of step 5 was finite; 6, 8 and 10 are nobody's word
    assert {(j.where / f"finite.{r}").read_text() for r in (0, 1)} == {"True"}
    assert [f.step for f in found_in(j.where / "checkpoints")] == [40, 38]  # 39 is the newest step that the loss of 40 vouches for


def test_numbers_that_go_bad_again_are_the_datas_or_the_codes(job):
    """The same step is bad with the ranks on other slots: the job ends and says so."""
    j = job("--nproc-per-node", 2, "bad_loss.py", "always", "one")
    assert j.wait() == 1
    assert [d.action for d in j.events(Decided)] == ["restart", "give up"]
    assert "not finite at step 7 again" in j.events(RunEnded)[0].reason
    assert "the data or the code" in j.err


def test_a_replica_that_went_astray_is_found_and_its_checkpoints_are_not_trusted(job):
    """One bit of one rank's model: found at a checkpoint after it, undone from the one before it, a strike for its slot. Weights end equal.

    One checkpoint is kept, and beside it the newest at which all ranks were equal.
    """
    quiet = job("--nproc-per-node", 3, "train.py", 40, "replicas", name="quiet").ok()
    plan = "param-flip:rank=1@step=12"
    j = job("--nproc-per-node", 3, "--chaos", plan, "train.py", 40, "replicas", "one", env={"TEST_PAUSE": "0.1"}).ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.rank, failed.slot) == ("replicas", 1, 1)
    assert [a.slots for a in j.events(AttemptStarted)] == [(0, 1, 2), (1, 2, 0)]
    (restored,) = j.events(Restored)
    assert restored.step == 10 < failed.step
    assert f"equal at step {failed.step} now" in "\n".join(n.text for n in j.events(Notice))
    final = {(where / f"final.l0.r{r}").read_text() for where in (quiet.where, j.where) for r in range(3)}
    assert len(final) == 1


def told(*digests, step=5, restored=-1):
    """The pages of ranks that have each told a digest, or none."""
    pages = {}
    for rank, digest in enumerate(digests):
        page, fd = Page.create()
        os.close(fd)
        page.restored(restored, "") if restored >= 0 else None
        page.beat(step=step)
        if digest is not None:
            page.replica(step, digest)
        pages[rank] = page.read()
    return pages


def test_who_is_odd_among_replicas():
    """The one of three that differs is suspected; of two nobody is, and one that has not told yet is waited for."""
    watch = NumbersWatch(3)
    assert watch.look(told(7, 7, 7)) is None
    assert watch.look(told(8, None, 7, step=10)) is None
    odd = watch.look(told(7, 7, 8, step=10))
    assert (odd.kind, odd.rank, odd.step, odd.alone, odd.trusted_step) == (Kind.REPLICAS, 2, 10, True, 5)
    two = NumbersWatch(2).look(told(7, 8, step=10, restored=3))
    assert (two.alone, two.trusted_step) == (False, 3)
    assert NumbersWatch(1).look(told(7)) is None


def test_ranks_of_other_nodes_are_compared_too():
    """Each node tells a step once, when all its ranks have; whoever hears whom first, one of them finds the odd rank among its own."""
    here, there = told(7, 7, step=10), {rank + 2: page for rank, page in told(7, 8, step=10).items()}
    a, b = NumbersWatch(4), NumbersWatch(4)
    assert a.look(here) is None and b.look(there) is None
    assert a.news(here) == (10, {0: 7, 1: 7}) and a.news(here) is None
    assert b.news(there) == (10, {2: 7, 3: 8})
    a.hear(10, {2: 7, 3: 8})
    b.hear(10, {0: 7, 1: 7})
    assert a.look(here) is None
    assert (odd := b.look(there)).rank == 3 and odd.alone and odd.step == 10
    a, b = NumbersWatch(2), NumbersWatch(2)
    here, there = told(7, step=10), {1: told(8, step=10)[0]}
    a.hear(10, {1: 8})
    b.hear(10, {0: 7})
    assert a.look(here) is None and (odd := b.look(there)).rank == 1 and not odd.alone
    a.hear(15, {1: 9})  # ahead of us: kept until we are there
    assert a.look(told(9, step=15)) is None and a.equal_step == -1


def test_steps_that_were_equal_are_trusted_and_a_rank_behind_is_waited_for():
    """Whatever comes in between: a rank that is two saves ahead has told all three."""
    watch = NumbersWatch(2)
    for step in (5, 10, 15):
        watch.hear(step, {0: step})
    for step in (5, 10):
        assert watch.look({1: told(step, step=step)[0]}) is None and watch.equal_step == step
    assert watch.look({1: told(16, step=15)[0]}).trusted_step == 10


def test_a_step_and_its_digest_are_read_as_they_were_written():
    """Both fit into one word, whatever their size; the step is the newest that it can be."""
    for step, digest in ((0, 0), (5, -1), (1 << 23, 1 << 60), ((1 << 23) + 7, 12345)):
        assert told(digest, step=step)[0].replica == (step, digest & (1 << 40) - 1)


def test_one_bit_of_any_parameter_is_another_digest():
    """In any tensor, of any type, in its last bytes, too; and a model without parameters of its own cannot be checked."""
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(5, 1, dtype=torch.bfloat16), torch.nn.Linear(2, 2, dtype=torch.float64)]
    replicas, digests = Replicas([torch.nn.Sequential(*layers)]), []
    page, fd = Page.create()
    os.close(fd)
    page.beat(step=3)
    for raw in [p.detach().view(-1).view(torch.uint8) for layer in layers for p in layer.parameters()]:
        for at, bit in ((0, 1), (-1, 1), (-1, 128)):
            raw[at] ^= bit
            replicas.take(3)
            replicas.tell(page)
            digests.append(page.read().replica)
    assert [step for step, _ in digests] == [3] * 18
    assert len(set(digests)) == 18
    with pytest.raises(ValueError, match="check_replicas"):
        Replicas([torch.nn.Identity()])


def bad(step, slot=1):
    return Failure(t=1.0, kind=Kind.NUMBERS, slot=slot, rank=1, step=step)


def test_another_step_is_another_matter():
    """Only the same step twice ends the job; a slot that alone has bad numbers three times in a row is left out."""
    slots = Slots(active=(0, 1, 2))
    assert decide([bad(5)], slots, Budgets(), 0).slots.active == (1, 2, 0)
    assert decide([bad(5), bad(9)], slots, Budgets(), 0).do is Do.RESTART
    assert "other devices" not in decide([bad(5)], Slots(active=(0,)), Budgets(), 0).reason
    assert "other devices" in decide([replace(bad(5), shared=True)], Slots(active=(0,)), Budgets(), 0).reason
    assert decide([bad(5), bad(9), bad(5)], slots, Budgets(), 0).do is Do.GIVE_UP
    assert decide([bad(5), bad(9), bad(11)], slots, Budgets(), 0).slots.active == (0, 2)
    assert decide([bad(5, -1), bad(9, -1), bad(11, -1)], slots, Budgets(), 0).do is Do.RESTART
