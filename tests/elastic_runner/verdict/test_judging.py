"""Each check of a verdict fails for the reason that it is there for, and names it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch

from goodrun.checkpoint import Checkpointer, ElasticSampler
from goodrun.checkpoint.catalogue import found_in
from goodrun.checkpoint.rehearsal import REHEARSAL_VARIABLE
from goodrun.elastic_runner.events import AttemptStarted, ChaosFired, Decided, DeviceVerdict, Failed, Notice, RunEnded, RunStarted
from goodrun.elastic_runner.journal import Journal
from goodrun.elastic_runner.verdict.answers import unanswered
from goodrun.elastic_runner.verdict.judging import judge
from goodrun.elastic_runner.verdict.samples import difference, trained_on
from goodrun.elastic_runner.verdict.takes import NoTake, Take
from goodrun.elastic_runner.verdict.weights import compare


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A take as a script of one rank leaves it: checkpoints of a small model, the samples, a record."""

    def play(name, *, steps=4, spoil=lambda model: None, skip=False, events=()):
        folder = tmp_path / name
        monkeypatch.setenv(REHEARSAL_VARIABLE, str(folder))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        sampler = ElasticSampler(8, global_batch=2)
        with Checkpointer(tmp_path / "meant", every=2, model=model, sampler=sampler) as checkpoints:
            for step in range(1, steps + 1):
                if step == steps:
                    spoil(model)
                if skip and step == 2:
                    sampler._position += 2
                checkpoints.step(step)
        (folder / "run").mkdir()
        journal = Journal(folder / "run")
        for event in (RunStarted(), AttemptStarted(world_size=1, slots=(0,)), *events, RunEnded(outcome="succeeded", step=steps)):
            journal.write(event)
        journal.close()
        return Take(folder=folder, status=0, seconds=1.0, lives=1, left=())

    return play


KILLED = (
    ChaosFired(entry="kill:rank=0@step=2", rank=0, slot=0),
    Failed(kind="signal", rank=0, slot=0, cause="rank 0 killed"),
    Decided(action="restart"),
)


def failed(verdict):
    return {c.name: c.text for c in verdict.checks if c.ok is False}


def test_equal_takes_pass(played, tmp_path):
    """Everything is equal, and neither take has touched the directory that the script named."""
    verdict = judge(played("quiet"), played("chaos", events=KILLED))
    assert verdict.passed, failed(verdict)
    assert {c.ok for c in verdict.checks} == {True}
    assert not (tmp_path / "meant").exists()


def spoilt(model):
    with torch.no_grad():
        model.weight[1, 1] += 1e-6


@pytest.mark.parametrize(
    ("how", "name", "says"),
    [
        ({"spoil": spoilt}, "same weights", "most in model.weight"),
        ({"steps": 2}, "same weights", "the newest checkpoint is that of step 2, not that of step 4"),
        ({"skip": True}, "same samples", "epoch 0: 2 lost"),
        ({"events": KILLED[:1]}, "faults seen", "kill:rank=0@step=2: no failure is on record"),
        ({"events": ()}, "faults fired", "0"),
    ],
)
def test_what_differs_fails_and_is_named(played, how, name, says):
    """A weight in its last bits, a checkpoint that is missing, a sample that was skipped, a fault that nobody saw, no fault at all."""
    verdict = judge(played("quiet"), played("chaos", **{"events": KILLED, **how}))
    assert says in failed(verdict)[name]
    assert not verdict.passed


def test_a_bad_end_and_what_is_left_behind_fail(played):
    """A status, a run that did not end, and leftovers."""
    quiet, hurt = played("quiet"), played("chaos", events=KILLED)
    assert "status 69" in failed(judge(quiet, replace(hurt, status=69)))["ends well"]
    assert "did not end within 1 s" in failed(judge(quiet, replace(hurt, status=None)))["ends well"]
    assert failed(judge(quiet, replace(hurt, left=("process 12 (sleep)",)))) == {"left behind": "process 12 (sleep)"}
    assert "less than the 0.9 asked for" in failed(judge(quiet, hurt, 0.9))["goodput"]


def test_a_damaged_last_checkpoint_fails(played):
    """What cannot be restored is no equal result."""
    quiet, hurt = played("quiet"), played("chaos", events=KILLED)
    root = next(hurt.folder.rglob("manifest.json")).parents[1]
    shard = found_in(root)[0].path / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    assert "is damaged: __0_0.distcp" in failed(judge(quiet, hurt))["same weights"]


def test_another_world_size_bears_noise_and_no_more(played):
    """Sums and random numbers are others then: equal weights cannot be asked for; those of another training are wrong at any size."""
    shrunk = (*KILLED, AttemptStarted(world_size=2, slots=(0,)))

    def far(model):
        with torch.no_grad():
            model.weight.mul_(3)

    quiet = played("quiet")
    near = judge(quiet, played("near", spoil=spoilt, events=shrunk))
    assert near.passed, failed(near)
    assert {c.name for c in near.checks if c.ok is None} == {"same weights"}
    assert "apart" in failed(judge(quiet, played("far", spoil=far, events=shrunk)))["same weights"]


def test_a_script_without_checkpoints_or_sampler_is_told_so(tmp_path):
    """What cannot be compared is not known: neither equal nor different."""
    (tmp_path / "a").mkdir()
    assert compare(tmp_path / "a", tmp_path / "a") == []
    assert trained_on(tmp_path / "a") == {}


def test_the_newest_attempt_that_trained_on_a_batch_counts(tmp_path):
    """What an attempt did beyond its last checkpoint is thrown away; a later launcher is newer than any attempt of the one before."""
    folder = tmp_path / "samples"
    folder.mkdir()
    for name, text in (
        ("0000000001.000000.0", "0 0 1 2\n0 4 5\n"),
        ("0000000001.000000.1", "0 0 3 4\n"),
        ("0000000001.000003.0", "0 4 5 6 7 8\n"),
        ("0000000002.000000.0", "0 8 9\n"),
    ):
        (folder / name).write_text(text)
    assert trained_on(tmp_path) == {(0, 0): Counter([1, 2, 3, 4]), (0, 4): Counter([5, 6, 7, 8]), (0, 8): Counter([9])}


def test_batches_may_be_cut_differently():
    """At another global batch the samples of an epoch are the same ones; one that is lost and one repeated are named."""
    quiet = {(0, 0): Counter([1, 2]), (0, 2): Counter([3, 4])}
    assert difference(quiet, {(0, 0): Counter([1, 2, 3, 4])}) == ""
    assert difference(quiet, {(0, 0): Counter([1, 2, 2, 4])}) == "epoch 0: 1 lost (as 3), 1 repeated or new (as 2)"


def fired(entry, rank=1, slot=1):
    return ChaosFired(entry=entry, rank=rank, slot=slot, t=1.0)


def failure(kind, rank=1):
    return Failed(kind=kind, rank=rank, cause="why", t=2.0), Decided(action="restart", t=2.0)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([fired("kill:rank=1@step=3"), *failure("signal")], None),
        ([fired("kill:rank=1@step=3"), *failure("hang")], "on record as hang"),
        ([fired("kill:rank=1@step=3"), *failure("signal", rank=0)], "rank 0 is blamed"),
        ([fired("kill:rank=1@step=3"), failure("signal")[0]], "nothing was decided"),
        ([fired("deadlock:rank=1@step=3"), *failure("hang", rank=0)], None),
        ([fired("slow:rank=1@step=3")], None),
        ([fired("kill:rank=1@step=3"), fired("hang:rank=0@step=3", rank=0), *failure("signal")], None),
        ([fired("kill:rank=1@step=3"), fired("preempt@step=3")], None),
        ([fired("keeper-kill@step=3"), Notice(text="the keeper of the checkpoints has died (status -9)", t=1.5)], None),
        ([fired("keeper-kill@step=3"), Notice(text="something else", t=9.0)], "nothing is said"),
        ([fired("xid:slot=1,code=31@step=3"), Notice(t=9.0)], "no verdict on the GPU"),
        ([fired("xid:slot=1,code=31@step=3"), DeviceVerdict(slot=1, verdict="RESTART")], None),
        ([fired("gpu-lost:slot=1,for=1s@step=3")], None),
        ([fired("memory-held:slot=1@step=3")], None),
        ([fired("param-flip:rank=1@step=3"), *failure("replicas", rank=0)], None),
        ([fired("param-flip:rank=1@step=3")], "no failure is on record"),
        ([fired("gpu-lost:slot=1@step=3"), DeviceVerdict(slot=1, verdict="SHED")], "no failure is on record"),
    ],
)
def test_a_fault_must_be_on_record_as_what_it_was(events, says):
    """Its kind, its rank, and an answer; but for two at once, of which only the first is seen, and for a launcher that was ended."""
    found = unanswered([RunStarted(), AttemptStarted(), *events])
    assert (says in found[0]) if says else found == []


def test_a_folder_that_is_no_take_is_refused(tmp_path):
    """In one sentence that says what to give."""
    with pytest.raises(NoTake, match="give the folder"):
        Take.load(tmp_path)
