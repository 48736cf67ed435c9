"""Every option of torchrun's, given to torchrun and to goodrun with the same script: status, output, logs and environment are compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

JOBS = Path(__file__).parent / "jobs"
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TMPDIR", "TEST_DIR"}
"""What differs by design or from run to run; docs/compatibility.md says why."""

COMMANDS = {
    "one node, every way of logging": [
        *("--nnodes=1", "--nproc-per-node=2", "--role=trainer", "--max-restarts=0", "--monitor-interval=0.05", "--start-method=spawn"),
        *("--log-dir=logs", "--redirects=0:1,1:2", "--tee=1:1", "--local-ranks-filter=0,1", "--event-log-handler=null"),
        *("--signals-to-handle=SIGTERM,SIGINT", "--shutdown-timeout=5", "--local-addr=127.0.0.1"),
    ],
    "filtered copies of the logs": [
        *("--nproc_per_node", "2", "--log_dir", "logs", "-r", "3"),
        *("--duplicate-stdout-filters=out", "--duplicate-stderr-filters=nothing-like-it"),
    ],
    "a static rendezvous": ["--node-rank=0", "--master-addr=127.0.0.1", "--master-port={port}", "--nproc-per-node=2", "--rdzv-id=job7"],
    "a c10d rendezvous": [
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job7", "--rdzv-conf=join_timeout=30,last_call_timeout=1"),
        *("-t", "3", "--nnodes=1:1"),
    ],
    "standalone, with one visible device": ["--standalone", "--nproc-per-node=2", "--virtual-local-rank"],
    "a layout of logs by name": ["--logs-specs=default", "--nproc-per-node=1", "--redirects=3", "--log-dir=logs"],
    "a module": ["--standalone", "-m"],
    "a program": ["--no-python", sys.executable],
    "a path": ["--run-path"],
    "a NUMA binding where there is no GPU": ["--numa-binding=node"],
}


def spelled(argv):
    """The options named in `argv`, by their destination in torchrun's parser."""
    actions = get_args_parser()._option_string_actions
    words = [w.partition("=")[0] for w in argv if w.startswith("-")]
    return {actions[w].dest for w in words if w in actions}


def test_every_option_of_torchruns_is_compared():
    """A new option of torchrun's fails this until it is in the table above."""
    every = {a.dest for a in get_args_parser()._actions if a.option_strings} - {"help"}
    assert every - set().union(*map(spelled, COMMANDS.values())) == set()


def told(j):
    """(environment by rank, log files by name, lines on the console) of a job of tell_all.py."""
    environments = [json.loads(p.read_text()) for p in sorted(j.where.glob("environment.*"))]
    logs = {
        str(Path(*p.relative_to(j.where).parts[2:])): p.read_text() for p in sorted(j.where.glob("logs/*/attempt_0/**/*")) if p.is_file()
    }
    lines = sorted(line for line in (j.out + j.err).splitlines() if re.search(r"(out|err) of rank", line))
    return [{k: v for k, v in e.items() if k not in OWN and not k.startswith("GOODRUN_")} for e in environments], logs, lines


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_fares_as_under_torchrun(both, tmp_path, name):
    """The same status, the same environment in each rank, the same log files with the same words, the same lines on the console."""
    argv = COMMANDS[name]
    for launcher in ("torchrun", "goodrun"):
        (tmp_path / launcher).mkdir()
        (tmp_path / launcher / "tell_all.py").write_text((JOBS / "tell_all.py").read_text())
    script = "tell_all" if argv[-1] == "-m" else "./tell_all.py"
    jobs = both(*argv, script, "--a", "b c")
    statuses = [j.wait() for j in jobs]
    theirs, ours = map(told, jobs)
    if "NUMA" in name:
        assert all(statuses)
        return
    assert statuses == [0, 0], jobs[1].err
    assert theirs[0]
    for t, o in zip(theirs[0], ours[0], strict=True):
        o["TORCHELASTIC_USE_AGENT_STORE"] = t["TORCHELASTIC_USE_AGENT_STORE"]  # always True with goodrun
        assert o == t
    assert ours[1:] == theirs[1:]
    assert bool(theirs[1]) is any("log" in w for w in argv)


@pytest.fixture
def plugins(tmp_path):
    """An installed distribution with a layout of logs and a rendezvous backend, found by entry point; the environment that shows it."""
    site = tmp_path / "installed"
    info = site / "plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = plugins:Logs\n\n[torchrun.handlers]\nmine = plugins:handler\n")
    (site / "plugins.py").write_text(
        "from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs\n"
        "from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry\n"
        "class Logs(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        for env in envs.values():\n"
        "            env['LOGS_ARE'] = 'mine'\n"
        "        return super().reify(envs)\n"
        "def create(params):\n"
        "    print('rendezvous is mine')\n"
        "    c10d = RendezvousParameters('c10d', 'localhost:0', params.run_id, params.min_nodes, params.max_nodes, params.local_addr)\n"
        "    mine = rendezvous_handler_registry.create_handler(c10d)\n"
        "    mine.get_backend = lambda: 'mine'\n"
        "    return mine\n"
        "def handler():\n"
        "    return create\n"
    )
    return {"PYTHONPATH": os.pathsep.join(p for p in (str(site), os.environ.get("PYTHONPATH")) if p)}


def test_layouts_and_backends_of_others_are_found_by_entry_point(both, plugins):
    """Groups torchrun.logs_specs and torchrun.handlers."""
    jobs = both("--logs-specs", "mine", "--rdzv-backend", "mine", "--rdzv-endpoint", "x:1", "tell_all.py", env=plugins)
    theirs, ours = (told(j.ok()) for j in jobs)
    assert [e["LOGS_ARE"] for e in ours[0]] == [e["LOGS_ARE"] for e in theirs[0]] == ["mine"]
    assert all("rendezvous is mine" in j.out for j in jobs)


def in_python(tmp_path, code):
    """Output and status of a program that starts jobs by a call, with the folder of goodrun on its path."""
    import goodrun

    env = {**os.environ, "PYTHONPATH": str(Path(goodrun.__file__).parent.parent), "GOODRUN_HOME": str(tmp_path), "TEST_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    return done.stdout, done.returncode, done.stderr


CALLS = """
import sys, threading
from goodrun.elastic_runner.cli import main
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

def call(*args):
    try:
        return main(["--nproc-per-node", "2", "--max-restarts", "0", *args])
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        return f"rank {rank} failed with {failure.exitcode}"
    except SystemExit as e:
        return f"exit {e.code}"

script = SCRIPT
def show(*args):
    print(f"\\ncalled: {call(*args)}.", flush=True)


show(script, "0")
show(script, "3")
show("--no-such-option", script)
t = threading.Thread(target=show, args=(script, "0"))
t.start(); t.join()
"""


def test_main_may_be_called_as_torchruns_is(tmp_path):
    """`main(args)` returns None, raises torch's ChildFailedError or SystemExit, more than once in a process, and in any thread."""
    out, status, err = in_python(tmp_path, CALLS.replace("SCRIPT", repr(str(JOBS / "tell.py"))))
    said = re.findall(r"called: (.*?)\.", out)  # the ranks print on the same stream
    assert said in (["None", f"rank {rank} failed with 3", "exit 2", "None"] for rank in (0, 1)), err
    assert status == 0


def test_a_launcher_that_is_itself_a_worker_leaves_its_error_file(job, tmp_path):
    """@record: the first failure's error goes where TORCHELASTIC_ERROR_FILE of the launcher's own environment says."""
    errors = {}
    for launcher in ("torchrun", "goodrun"):
        mine = tmp_path / f"{launcher}.json"
        env = {"TORCHELASTIC_ERROR_FILE": str(mine), "TMPDIR": str(tmp_path)}
        j = job("--max-restarts", 0, "recorded.py", launcher=launcher, name=launcher, env=env)
        assert j.wait() == 1
        errors[launcher] = json.loads(mine.read_text())["message"]["message"]
    assert errors["goodrun"] == errors["torchrun"]
