"""Warm start: restarts come from processes that have torch imported, and a script cannot tell."""

import ast
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from goodrun.elastic_runner.events import FirstStep, WorkersSpawned
from goodrun.elastic_runner.nursery import foreseen, why_cold


def kept(job):
    """The launcher's children that look like ranks and are none: the template, and its forks that wait."""
    children = Path(f"/proc/{job.proc.pid}/task/{job.proc.pid}/children").read_text().split()
    look_alike = [int(p) for p in children if "\0-u\0" in Path(f"/proc/{p}/cmdline").read_text()]
    return [p for p in look_alike if p not in job.events(WorkersSpawned)[-1].pids]


def restart(job, *flags, ready=3, **env):
    """Two ranks train; once what is kept warm for them exists, rank 1 is killed, and the job ends with its second generation."""
    j = job("--nproc-per-node", 2, *flags, "warm.py", "some", "--words", env=env, name=f"job{len(flags)}")
    j.until(lambda: j.events(FirstStep))
    j.until(lambda: len(kept(j)) == ready, 60)
    os.kill(j.events(WorkersSpawned)[0].pids[1], signal.SIGKILL)
    return j.ok()


def test_a_script_cannot_tell_a_warm_start_from_a_cold_one(job):
    """argv, __main__, path, environment, ps, descriptors, torch's random state: first start and restart are as without any warmth."""
    warm, cold = restart(job), restart(job, "--warm-start", "off", ready=0)
    assert [e.warm for e in warm.events(WorkersSpawned)] == [2, 2]
    assert [e.warm for e in cold.events(WorkersSpawned)] == [0, 0]
    for name in warm.marks("seen.*"):
        seen = [json.loads((j.where / name).read_text().replace(str(j.where), "")) for j in (warm, cold)]
        for s in seen:  # what differs from run to run
            for variable in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "GOODRUN_RUN_STARTED", "GOODRUN_KEEPER"):
                s["environment"].pop(variable)
            s["path"] = [p for p in s["path"] if not os.path.basename(p).startswith("tmp")]  # which older torch makes as it is imported
        assert seen[0] == seen[1]
    random = [(j.where / name).read_text() for j in (warm, cold) for name in j.marks("random.r*")]
    for one_kind in zip(*map(ast.literal_eval, random), strict=True):
        assert len(set(one_kind)) == 8  # nobody copies another's random state


def test_output_of_a_warm_start_goes_to_its_own_logs(job):
    """Redirected streams follow the rank, not the process's first output."""
    j = restart(job, "--redirects", 3, "--log-dir", "logs")
    found = {p.parts[-3]: p.read_text() for p in (j.where / "logs").rglob("1/stdout.log")}
    assert found == {"attempt_0": "generation 0\n", "attempt_1": "generation 1\n"}
    assert "generation" not in j.out


def test_what_is_kept_warm_may_die_at_any_moment(job):
    """Template and standbys that are gone are made again, or done without: a start is slower then, and no more."""
    j = job("--nproc-per-node", 2, "warm.py")
    j.until(lambda: j.events(FirstStep))
    for pid in j.until(lambda: kept(j), 60):
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
    assert kept(j) == []
    assert "cold" not in j.ok().err


def module(tmp_path, name, text):
    """An installed module of that name, as far as Python's path is concerned."""
    (tmp_path / "installed").mkdir(exist_ok=True)
    (tmp_path / "installed" / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join(p for p in (str(tmp_path / "installed"), os.environ.get("PYTHONPATH")) if p)}


def test_what_is_preloaded_is_there_before_the_script_begins(job, tmp_path):
    """--preload NAME: imported once, for all ranks."""
    env = module(tmp_path, "heavy", "import os\nprint('imported by', os.getpid(), flush=True)\n")
    script = tmp_path / "uses.py"
    script.write_text("import sys\nassert 'heavy' in sys.modules\nimport heavy\n")
    j = job("--nproc-per-node", 2, "--preload", "heavy", script, env=env).ok()
    assert j.out.count("imported by") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "started 1 thread"),
        ("raise RuntimeError('no licence')\n", "--preload heavy failed: RuntimeError: no licence"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "died before it was ready"),
    ],
)
def test_what_cannot_be_preloaded_makes_starts_cold_and_never_fails_them(job, tmp_path, text, why):
    """A fork of a process with threads would not be a fresh process: one line says so, and the ranks start as torchrun's do."""
    env = module(tmp_path, "heavy", text)
    script = tmp_path / "plain.py"
    script.write_text("import torch\n")
    j = job("--nproc-per-node", 2, "--preload", "heavy", script, env=env).ok()
    assert [e.warm for e in j.events(WorkersSpawned)] == [0]
    (line,) = [line for line in j.err.splitlines() if "cold" in line]
    assert why in line


def test_preload_auto_learns_from_the_first_start(job, tmp_path):
    """What the script imported in the first attempt is there when the second one begins."""
    script = tmp_path / "learns.py"
    script.write_text(
        "import os, sys, torch\n"
        "print(os.environ['GOODRUN_GENERATION'], 'yaml' in sys.modules, flush=True)\n"
        "import yaml, time\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "while True:\n"
        "    optimizer.step()\n"
        "    if os.environ['GOODRUN_GENERATION'] == '1': break\n"
        "    time.sleep(0.02)\n"
    )
    j = job("--nproc-per-node", 1, "--preload", "auto", script)
    j.until(lambda: j.events(FirstStep))
    j.until(lambda: sum(b"GOODRUN_PRELOAD=" in Path(f"/proc/{p}/environ").read_bytes() for p in kept(j)) == 2, 60)
    os.kill(j.events(WorkersSpawned)[0].pids[0], signal.SIGKILL)
    assert j.ok().out.split() == ["0", "False", "1", "True"]


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (["{}", "--lr", "1"], None),
        (["--nproc-per-node", "4", "--tee", "3", "{}", "other.py"], "1"),
        (["--nproc_per_node=4", "{}"], "1"),
        (["--standalone", "--nproc-per-node=1", "--", "{}"], None),
    ],
)
def test_the_workers_command_is_foreseen(tmp_path, words, threads):
    """The template starts beside the launcher's own imports, with the command and threads that the ranks will have."""
    script = str(tmp_path / "train.py")
    Path(script).write_text("import torch\n")
    argv = [w.format(script) for w in words]
    command, env = foreseen(argv, {"A": "b"})
    assert command == (sys.executable, "-u", *argv[argv.index(script) :])
    assert env == {"A": "b", **({"OMP_NUM_THREADS": threads} if threads else {})}


@pytest.mark.parametrize(
    "words",
    [["-m", "{}"], ["--no-python", "{}"], ["--no_python", "{}"], ["--warm-start=off", "{}"], ["--run-path", "{}"], ["no-such.py"], []],
)
def test_where_warm_start_may_not_be_used_nothing_is_foreseen(tmp_path, words):
    """No process is started for a command line that will not want it."""
    script = str(tmp_path / "train.py")
    Path(script).write_text("import torch\n")
    assert foreseen([w.format(script) for w in words], {}) is None


def test_a_wrong_guess_is_thrown_away(job, tmp_path):
    """The launcher thought of one script, the command line meant another: that one runs, warm all the same."""
    (tmp_path / "decoy.py").write_text("")
    script = tmp_path / "meant.py"
    script.write_text("import sys\nprint(sys.argv, flush=True)\n")
    j = job("--role", tmp_path / "decoy.py", "--nproc-per-node", 2, script, "x").ok()
    assert j.out.count(str([str(script), "x"])) == 2
    assert j.events(WorkersSpawned)[0].warm == 2
