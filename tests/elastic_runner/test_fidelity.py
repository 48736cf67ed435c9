"""A script cannot tell goodrun from torchrun: the same program is run by both, and what each rank saw is compared."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import goodrun

ROOT = str(Path(goodrun.__file__).parent.parent)
"""Where the workers of these tests find `goodrun`, if it is not installed."""

DIFFERENT = {
    "MASTER_ADDR": "torchrun uses the machine's name, we the loopback address where there is one node",
    "MASTER_PORT": "chosen by the system",
    "TORCHELASTIC_ERROR_FILE": "below the run's own folder",
    "TORCHELASTIC_MAX_RESTARTS": "uncapped unless the user gives --max-restarts",
    "TORCHELASTIC_RUN_ID": "torchrun makes one up where there is none",
    "TORCHELASTIC_USE_AGENT_STORE": "always True: the launcher serves the fresh store of each attempt",
    "TEST_DIR": "the test's own",
    "TMPDIR": "the test's own: torchrun leaves a folder for its logs there, we none",
}


def seen(job, ranks=2):
    """What each rank of the job wrote down."""
    return [json.loads((job.ok().where / f"seen.r{r}").read_text()) for r in range(ranks)]


def comparable(told, where):
    """What was told, without the name of the job's folder."""
    return json.loads(json.dumps(told).replace(str(where), "WHERE"))


def site(tmp_path):
    """A folder with a sitecustomize of the user's."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import os\nos.environ['USERS_SITE'] = 'ran ' + __file__\n")
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--nproc-per-node", 2, "--max-restarts", 3], id="PYTHONPATH as it is"),
        pytest.param(["--nproc-per-node", 2, "--role", "trainer"], id="user's sitecustomize"),
    ],
)
def test_a_script_sees_what_it_sees_under_torchrun(both, tmp_path, flags):
    """argv, __main__, sys.path, folder, session, buffering, environment, and what its own children inherit."""
    env = {"PYTHONPATH": os.pathsep.join([str(site(tmp_path)), ROOT])} if "--role" in flags else {"PYTHONPATH": ROOT}
    jobs = both(*flags, "fidelity.py", "--a", "b c", "--", "-m", "${local_rank}", env=env)
    for theirs, ours in zip(seen(jobs[0]), seen(jobs[1]), strict=True):
        theirs, ours = comparable(theirs, jobs[0].where), comparable(ours, jobs[1].where)
        environments = [t.pop("environment") for t in (theirs, ours)]
        theirs.pop("hook"), ours.pop("hook")  # a sitecustomize is loaded: goodrun's, or behind it the user's
        assert ours == theirs
        assert ours["leader"] and ours["unbuffered"] and ours["name"] == "__main__"
        assert ours["argv"][1:4] == ["--a", "b c", "--"]
        for name in DIFFERENT.keys() & environments[0].keys():
            assert name in environments[1], f"{name} is missing"
        same = [{k: v for k, v in e.items() if k not in DIFFERENT} for e in environments]
        assert same[1] == same[0]
        assert environments[1].get("USERS_SITE", "").startswith("ran") is ("--role" in flags)
        if "--max-restarts" in flags:
            assert [e["TORCHELASTIC_MAX_RESTARTS"] for e in environments] == ["3", "3"]
        assert environments[1]["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize("value", [None, "", "/somewhere:"])
def test_pythonpath_is_given_back(job, tmp_path, value):
    """Unset, empty, with an empty part: the script and its children find what torchrun's find, and sys.path is the same."""
    env = {} if value is None else {"PYTHONPATH": value}
    own = {**env, "TMPDIR": str(tmp_path)}
    code = f"import sys, runpy; sys.path.insert(0, {ROOT!r}); sys.argv[0] = 'x'; runpy.run_module('goodrun.elastic_runner', alter_sys=True)"
    start = ["env", *(["-u", "PYTHONPATH"] if value is None else [])]
    theirs = job("-m", "torch.distributed.run", "fidelity.py", prefix=(*start, sys.executable), launcher="-u", name="torchrun", env=own)
    ours = job("-c", code, "--run-dir", "run", "fidelity.py", prefix=(*start, sys.executable), launcher="-u", name="goodrun", env=env)
    told = [comparable(seen(j, 1)[0], j.where) for j in (theirs, ours)]
    assert told[1]["environment"].get("PYTHONPATH") == told[0]["environment"].get("PYTHONPATH") == value
    assert told[1]["path"] == told[0]["path"]
    assert told[1]["children"] == told[0]["children"]


def test_a_module_is_run_as_by_torchrun(both, tmp_path):
    """`-m` puts the folder on the path and the module's file in argv[0], as `python -m` does."""
    source = (Path(__file__).parent / "jobs" / "fidelity.py").read_text()
    for name in ("torchrun", "goodrun"):
        (tmp_path / name / "package").mkdir(parents=True)
        (tmp_path / name / "package" / "told.py").write_text(source)
    jobs = both("-m", "package.told", "-m", "x")
    told = [comparable(seen(j, 1)[0], j.where) for j in jobs]
    for key in ("argv", "orig_argv", "name", "main", "path", "cwd"):
        assert told[1][key] == told[0][key]
    assert told[1]["argv"] == ["WHERE/package/told.py", "-m", "x"]


@pytest.mark.parametrize("kind", ["--run-path", "--no-python", "PYTHON_EXEC"])
def test_other_ways_to_run(both, tmp_path, kind):
    """--run-path and --no-python give the program torchrun's argv, and PYTHON_EXEC its interpreter; its command line is what `ps` shows."""
    told = str(Path(__file__).parent / "jobs" / "fidelity.py")
    other = tmp_path / "other-python"
    other.symlink_to(sys.executable)
    argv = {
        "--run-path": ["--run-path", told, "a", "--b=c"],
        "--no-python": ["--no-python", sys.executable, told, "--help"],
        "PYTHON_EXEC": [told, "x"],
    }[kind]
    env = {"PYTHON_EXEC": str(other), "PYTHONPATH": ROOT + os.pathsep + os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))}
    jobs = both(*argv, env=env if kind == "PYTHON_EXEC" else None)
    theirs, ours = (comparable(seen(j, 1)[0], j.where) for j in jobs)
    assert ours["argv"] == theirs["argv"]
    assert ours["name"] == theirs["name"] == "__main__"
    assert ours["leader"]
    if kind != "--run-path":  # torchrun runs it through a function in a process of multiprocessing's, we as a command
        assert ours["orig_argv"] == theirs["orig_argv"]


def test_ps_shows_the_script(job):
    """A rank is `python -u script arguments`, a child of the launcher."""
    j = job("plain.py", "wait", "SIGUSR1")
    pid = int(j.until(lambda: j.marks("up.r0.g0") and (j.where / "up.r0.g0").read_text()))
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    assert words[1:] == ["-u", str(Path(__file__).parent / "jobs" / "plain.py"), "wait", "SIGUSR1"]
    assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == j.proc.pid
    (j.where / "finish").touch()
    j.ok()


def test_children_of_a_rank_beat_for_nobody(job):
    """Whatever way a rank makes processes (spawn, fork, forkserver): none has its page, and a heartbeat in one is no beat of the rank's."""
    j = job("whereabouts.py").ok()
    told = json.loads((j.where / "whereabouts").read_text())
    inherited = ["PYTHONPATH"] if "PYTHONPATH" in os.environ else []
    for method in ("spawn", "fork", "forkserver"):
        assert told[method] == [False, inherited], method
    assert told["self"] == [True, -1]
    assert told["inheritable"] == [False]  # one descriptor, which no program that the rank starts gets to see


@pytest.mark.parametrize("ending", ["3", "raise"])
def test_a_failing_script_ends_the_job_with_1(both, ending):
    """torchrun's exit status for every failure, and the script's own traceback as Python prints it."""
    theirs, ours = both("--max-restarts", 0, "tell.py", ending)
    assert (theirs.wait(), ours.wait()) == (1, 1)
    assert ours.out == theirs.out == "out of rank 0\n"
    assert "err of rank 0" in ours.err
    if ending == "raise":
        traceback = re.compile(r"^Traceback \(most recent call last\):\n  File .*tell\.py.*\n.*\nValueError: rank 0 has had enough\n", re.M)
        assert traceback.search(theirs.err) and traceback.search(ours.err)


@pytest.mark.parametrize("flags", [["--tee", "3"], ["--redirects", "0:1,1:2"]], ids=" ".join)
def test_logs_are_laid_out_as_torchruns(both, flags):
    """The same files with the same content below attempt_0, and the same lines on the console."""
    trees, consoles = [], []
    for j in both("--nproc-per-node", 2, *flags, "--log-dir", "logs", "tell.py", "0"):
        j.ok()
        below = [p.parent for p in j.where.glob("logs/*/attempt_0/0")]
        files = [p for b in below for p in sorted(b.rglob("*")) if p.is_file()]
        trees.append({str(p.relative_to(below[0])): p.read_text() for p in files})
        lines = (j.out + j.err).splitlines()
        consoles.append(sorted(line for line in lines if re.search(r"(out|err) of rank", line)))
    assert trees[1] == trees[0]
    assert consoles[1] == consoles[0]
    assert trees[0]
