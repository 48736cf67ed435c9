"""A loss that is not finite: back to the last good checkpoint, once more on other devices, and then a word on whose fault it is."""

from __future__ import annotations

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import AttemptStarted, Decided, Failed, Notice, Restored, RunEnded
from goodrun.elastic_runner.policy import Budgets, Do, Failure, Kind, Slots, decide


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


def test_numbers_that_go_bad_again_are_the_datas_or_the_codes(job):
    """The same step is bad with the ranks on other slots: the job ends and says so."""
    j = job("--nproc-per-node", 2, "bad_loss.py", "always", "one")
    assert j.wait() == 1
    assert [d.action for d in j.events(Decided)] == ["restart", "give up"]
    assert "not finite at step 7 again" in j.events(RunEnded)[0].reason
    assert "the data or the code" in j.err


def bad(step, slot=1):
    return Failure(t=1.0, kind=Kind.NUMBERS, slot=slot, rank=1, step=step)


def test_another_step_is_another_matter():
    """Only the same step twice ends the job; a slot that alone has bad numbers three times in a row is left out."""
    slots = Slots(active=(0, 1, 2))
    assert decide([bad(5)], slots, Budgets(), 0).slots.active == (1, 2, 0)
    assert decide([bad(5), bad(9)], slots, Budgets(), 0).do is Do.RESTART
    assert decide([bad(5), bad(9), bad(5)], slots, Budgets(), 0).do is Do.GIVE_UP
    assert decide([bad(5), bad(9), bad(11)], slots, Budgets(), 0).slots.active == (0, 2)
    assert decide([bad(5, -1), bad(9, -1), bad(11, -1)], slots, Budgets(), 0).do is Do.RESTART
