"""A job that is asked to stop saves, all ranks at the same step, and says what it left."""

import os
import signal

import pytest

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import Failed, FirstStep, RunEnded, WorkersSpawned


@pytest.mark.parametrize("whom", ["launcher", "one rank"])
def test_a_stop_signal_saves_one_step_on_all_ranks(job, whom):
    """SIGTERM to the launcher, or to one rank alone: all ranks save the same step and go; the status says SIGTERM."""
    j = job("--nproc-per-node", 2, "train.py", 100_000, env={"TEST_PAUSE": "0.02"})
    # a rank listens from the end of its first step on
    j.until(lambda: len(j.marks("samples.*")) == 2 and all((j.where / n).read_text().count("\n") > 2 for n in j.marks("samples.*")))
    pid = j.proc.pid if whom == "launcher" else j.events(WorkersSpawned)[0].pids[1]
    os.kill(pid, signal.SIGTERM)
    assert j.wait(40) == 143
    newest = found_in(j.where / "checkpoints")[0]
    assert newest.fault is None
    assert f"goodrun: asked to stop: step {newest.step} is saved, leaving" in j.err
    assert f"goodrun: step {newest.step} was saved on the way out" in j.err
    done = [int(line.split()[0]) for line in (j.where / "samples.l0.g000.r0").read_text().splitlines()]
    assert done[-1] == newest.step, "the step that was saved is the last one that was trained"
    assert j.events(RunEnded)[0].outcome == "stopped"


def test_a_job_that_cannot_save_says_so(job):
    """A stop signal while no step comes to an end: the ranks are killed when their time is up, and the report names what is left."""
    j = job("--nproc-per-node", 2, "--shutdown-timeout", 2, "--hang-detection", "off", "train.py", 30, "sleep:0@7")
    # step 5 is written behind the training's back: only when it is on the disk is it what the next run goes on from
    j.until(lambda: (j.where / "asleep").exists() and [f.step for f in found_in(j.where / "checkpoints") if not f.fault][:1] == [5])
    j.proc.terminate()
    assert j.wait(40) == 143
    assert "no checkpoint was made on the way out: the next run goes on from step 5" in j.err


@pytest.mark.parametrize("resumes", [0, 10])
def test_a_stop_signal_while_the_first_step_is_compiled(job, resumes):
    """Six preemptions and no emergency save: what a run that is stopped before its first step leaves is said, and no save is claimed."""
    first = job("--nproc-per-node", 2, "train.py", resumes).ok()
    env = {"TEST_LIFE": "1", "TEST_DIR": str(first.where)}
    j = job("--nproc-per-node", 2, "--shutdown-timeout", 5, "train.py", 100, "compile", env=env, name="second")
    j.until(lambda: len(first.marks("compiles.l1.*")) == 2)
    j.proc.terminate()
    assert j.wait(20) == 143
    assert f"no checkpoint was made on the way out: the next run goes on from step {resumes}" in j.err
    assert "was saved on the way out" not in j.err
    assert [found.step for found in found_in(first.where / "checkpoints")][:1] == [resumes] * bool(resumes)


def test_a_hang_after_the_last_checkpoint_names_it(job):
    """All is trained and saved, and one rank waits for a peer that has left: the words say which checkpoint is complete."""
    j = job("--nproc-per-node", 2, "train.py", 10, "barrier:1")
    assert j.wait(90) == 1
    (failed,) = j.events(Failed)
    assert failed.kind == "tear-down"
    assert "training was over: every rank had made step 10; the checkpoint of step 10 is complete" in failed.cause
    assert len(j.events(WorkersSpawned)) == 1


def test_keeper_is_started_again(job):
    """A keeper that is killed is replaced, training goes on without a restart, and later saves are durable."""
    j = job("--nproc-per-node", 2, "train.py", 100_000, env={"TEST_PAUSE": "0.02"})
    j.until(lambda: j.events(FirstStep))
    found = [int(p) for p in os.listdir("/proc") if p.isdigit() and _is_keeper_of(p, j.proc.pid)]
    assert len(found) == 1
    step = j.until(lambda: found_in(j.where / "checkpoints"))[0].step
    os.kill(found[0], signal.SIGKILL)
    j.until(lambda: found_in(j.where / "checkpoints")[0].step > step + 5 and found_in(j.where / "checkpoints")[0].manifest)
    assert "the keeper of the checkpoints has died" in j.err
    assert len(j.events(WorkersSpawned)) == 1
    j.proc.terminate()
    assert j.wait(40) == 143


def test_launcher_killed_after_a_save(job, living):
    """SIGKILL of the launcher: the ranks die, the keeper finishes what is whole, and nothing stays."""
    j = job("--nproc-per-node", 2, "--keeper-bandwidth", "0.02", "train.py", 100_000, env={"TEST_PAUSE": "0.02"})
    j.until(lambda: list((j.where / "checkpoints").glob("step-0000000005*")))
    j.proc.kill()
    j.proc.wait(10)
    j_end = j.where / "checkpoints"
    for _ in range(2000):
        if not living():
            break
        signal.sigtimedwait([], 0.02)
    assert not living()
    assert [f.fault for f in found_in(j_end) if f.step == 5] == [None]


def _is_keeper_of(pid, parent):
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as words:
            return int(stat.read().rpartition(")")[2].split()[1]) == parent and "goodrun.checkpoint.keeper" in words.read()
    except OSError:
        return False
