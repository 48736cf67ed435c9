"""Warm start: restarts come from processes that have torch imported, and a script cannot tell."""

import json
import os
import signal
from pathlib import Path

import pytest

from goodrun.elastic_runner.events import FirstStep, WorkersSpawned
from goodrun.elastic_runner.nursery import why_cold


def standbys(job):
    """The launcher's children that are no rank."""
    children = Path(f"/proc/{job.proc.pid}/task/{job.proc.pid}/children").read_text().split()
    return [int(p) for p in children if int(p) not in job.events(WorkersSpawned)[-1].pids]


def restart(job, *flags, ready=2, **env):
    """Two ranks train; once their standbys exist rank 1 is killed, and the job ends with its second generation."""
    j = job("--nproc-per-node", 2, *flags, "warm.py", "some", "--words", env=env)
    j.until(lambda: j.events(FirstStep))
    j.until(lambda: len(standbys(j)) == ready, 60)
    os.kill(j.events(WorkersSpawned)[0].pids[1], signal.SIGKILL)
    return j.ok()


def test_a_script_cannot_tell_a_warm_start_from_a_cold_one(job):
    """argv, __main__, path, environment, ps, descriptors, torch's random state: all as at the cold start before."""
    j = restart(job)
    assert [e.warm for e in j.events(WorkersSpawned)] == [0, 2]
    for rank in "01":
        cold, warm = (json.loads((j.where / f"seen.r{rank}.g{g}").read_text()) for g in "01")
        for seen in (cold, warm):  # what a new generation is bound to change
            for name in ("GOODRUN_GENERATION", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"):
                del seen["environment"][name]
        assert warm == cold
    assert len({(j.where / name).read_text() for name in j.marks("random.r*")}) == 4  # nobody copies another's random state


def test_output_of_a_warm_start_goes_to_its_own_logs(job):
    """Redirected streams follow the rank, not the process's first output."""
    j = restart(job, "--redirects", 3, "--log-dir", "logs")
    found = {p.parts[-3]: p.read_text() for p in (j.where / "logs").rglob("1/stdout.log")}
    assert found == {"attempt_0": "generation 0\n", "attempt_1": "generation 1\n"}
    assert "generation" not in j.out


def test_a_dead_standby_costs_a_cold_start_and_no_more(job):
    """Standbys that are gone are made again, or done without."""
    j = job("--nproc-per-node", 2, "warm.py")
    j.until(lambda: j.events(FirstStep))
    for pid in j.until(lambda: standbys(j), 60):
        os.kill(pid, signal.SIGKILL)
    os.kill(j.events(WorkersSpawned)[0].pids[0], signal.SIGKILL)
    j.ok()
    assert len(j.events(WorkersSpawned)) == 2


def test_a_script_that_sets_what_torch_reads_at_import_is_started_cold(job, tmp_path):
    """Warm start is not used where it would not be faithful, and one line says why."""
    script = tmp_path / "sets.py"
    script.write_text('import os\nos.environ["OMP_NUM_THREADS"] = "2"\nimport torch\n')
    j = job("--nproc-per-node", 1, script).ok()
    (line,) = [line for line in j.err.splitlines() if "cold" in line]
    assert "OMP_NUM_THREADS" in line
    assert "sets.py" in line


@pytest.mark.parametrize(
    ("beside", "cold"), [("random.py", True), ("torch", True), ("test", False), ("__main__.py", False), ("model.py", False)]
)
def test_only_a_module_that_torch_would_import_stands_in_front(tmp_path, beside, cold):
    """A file beside the script makes it start cold if torch's own imports would have found it first, and not otherwise."""
    (tmp_path / "train.py").write_text("import torch\n")
    if beside.endswith(".py"):
        (tmp_path / beside).touch()
    else:
        (tmp_path / beside).mkdir()
        (tmp_path / beside / "__init__.py").touch()
    assert bool(why_cold(str(tmp_path / "train.py"), is_python=True, env={})) is cold


def test_warm_start_can_be_turned_off(job):
    """--warm-start=off: no process but the ranks."""
    j = job("--nproc-per-node", 1, "--warm-start", "off", "train.py", 60)
    j.until(lambda: len(j.marks("samples.*")) == 1 and j.events(FirstStep))
    assert standbys(j) == []
    assert "cold" not in j.ok().err
