"""Hugging Face's Trainer, Lightning and accelerate, each the real library with a tiny model: a kill leaves no trace in the weights."""

from importlib.util import find_spec

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import AttemptStarted, Failed, Restored

pytestmark = pytest.mark.timeout(600)  # two or three whole runs each, with libraries that take seconds to import


def needs(library):
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed: pip install 'goodrun[{library}]'")


# epochs, samples per global batch, batches per optimizer step, optimizer steps between checkpoints
TRAINER = pytest.param("hf_trainer.py", 3, 12, 2, 1, marks=needs("transformers"), id="transformers")  # four steps an epoch
LIGHTNING = pytest.param("lightning_fit.py", 4, 10, 2, 1, marks=needs("lightning"), id="lightning")  # three: 2 + 2 + 1 batches
PRELOAD = {"hf_trainer.py": "transformers.trainer", "lightning_fit.py": "lightning.pytorch", "accelerate_loop.py": "accelerate"}


def start(job, script, *arguments, nproc=2, **more):
    chaos = ("--chaos", more.pop("chaos")) if "chaos" in more else ()
    return job("--nproc-per-node", nproc, "--preload", PRELOAD[script], "--hang-detection", "off", *chaos, script, *arguments, **more)


def samples(j):
    """By step, what the job trained on last, over all ranks; later attempts have redone some steps."""
    found = {}
    for name in j.marks("samples.*"):
        for line in (j.where / name).read_text().splitlines():
            step, world, *ids = map(int, line.split())
            found.setdefault(step, {}).setdefault((name.split(".")[1], world), []).extend(ids)
    return {step: sorted(by_attempt[max(by_attempt)]) for step, by_attempt in sorted(found.items())}


def final(j):
    return [(j.where / name).read_text() for name in j.marks("final.*")]


@pytest.mark.parametrize(("script", "epochs", "whole", "parts", "every"), [TRAINER, LIGHTNING])
def test_a_kill_leaves_no_trace(job, script, epochs, whole, parts, every):
    """Killed in the middle of an epoch and between two: samples, weights, schedule and counts are those of a quiet run."""
    arguments, kills = (script, epochs, whole, parts, every), (3, 5) if script == "hf_trainer.py" else (4, 7, 9)
    quiet = start(job, *arguments, name="quiet").ok(250)
    troubled = start(job, *arguments, chaos="; ".join(f"kill:rank={i % 2}@step={n}" for i, n in enumerate(kills)), name="troubled").ok(250)
    assert [e.step for e in troubled.events(Restored)] == [n - 1 for n in kills]
    assert final(quiet) == final(troubled)
    assert samples(quiet) == samples(troubled)


@pytest.mark.exhaustive
@needs("accelerate")
def test_accelerate_scripts_run_unchanged(job):
    """A script that saves and resumes by accelerate's own means is restarted from what it has saved."""
    quiet = start(job, "accelerate_loop.py", 3, name="quiet").ok(250)
    troubled = start(job, "accelerate_loop.py", 3, chaos="kill:rank=1@step=5", name="troubled").ok(250)
    assert len(troubled.events(Failed)) == 1
    assert final(quiet) == final(troubled)
    assert samples(quiet) == samples(troubled)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("script", "epochs", "whole", "parts", "every"), [TRAINER, LIGHTNING])
def test_at_another_size_every_sample_counts_once(job, script, epochs, whole, parts, every):
    """A run that loses a slot goes on with two ranks of three, at the same global batches of the same samples."""
    quiet = start(job, script, epochs, 12, parts, every, nproc=3, name="quiet").ok(250)
    shrunk = start(job, script, epochs, 12, parts, every, nproc=3, chaos="slot-lost:rank=1@step=3", name="shrunk").ok(250)
    assert [len(e.slots) for e in shrunk.events(AttemptStarted)] == [3, 2]
    assert samples(quiet) == samples(shrunk)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("script", "epochs", "whole", "parts", "every"), [TRAINER, LIGHTNING])
def test_a_stop_signal_saves_and_leaves(job, script, epochs, whole, parts, every):
    """SIGTERM under a framework that has an answer of its own: all ranks save the same step; the next start goes on from there."""
    j = start(job, script, 100_000, whole, parts, 1000, name="run")
    j.until(lambda: len(samples(j)) > 20, 60)
    j.proc.terminate()
    assert j.wait(60) == 143
    newest = found_in(j.where / "checkpoints")[0]
    assert newest.fault is None
    assert f"step {newest.step} was saved on the way out" in j.err
