"""The machine and the shell around a run: other interpreters, few cores, no home, tiny shared memory, output that nobody reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from goodrun.elastic_runner.events import AttemptStarted, Failed, RankHung, RunEnded, Stopped
from goodrun.elastic_runner.surroundings import other_environment, why_shared_memory

JOBS = Path(__file__).parent / "jobs"
PAIR = ("--nproc-per-node", 2)


def lines(j, word):
    """goodrun's own lines with `word` in them."""
    return [line for line in j.err.splitlines() if line.startswith("goodrun: ") and word in line]


def test_ranks_run_the_launchers_interpreter_and_a_wrong_environment_is_named(job, tmp_path):
    """The active environment is another Python's: one line names both before ranks start, whatever way the script is given."""
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    (tmp_path / "which.py").write_text("import sys\nprint('runs', sys.executable)\n")
    for form in ([tmp_path / "which.py"], ["-m", "which"], ["--run-path", tmp_path / "which.py"]):
        name = f"job{len(form)}{form[0]}".replace("/", "")
        (tmp_path / name).mkdir()
        (tmp_path / name / "which.py").write_text((tmp_path / "which.py").read_text())
        j = job(*form, env={"VIRTUAL_ENV": str(other)}, name=name).ok()
        assert f"runs {sys.executable}" in j.out
        (line,) = lines(j, "VIRTUAL_ENV")
        assert sys.executable in line
        assert f"{other}/bin/python -m goodrun" in line


@pytest.mark.parametrize("env", [{}, {"VIRTUAL_ENV": "/env"}, {"CONDA_PREFIX": "/env"}, {"VIRTUAL_ENV": "/env", "CONDA_PREFIX": "/base"}])
def test_the_right_environment_is_nothing_to_speak_of(env):
    """No line where goodrun belongs to an active environment, or none is active."""
    assert other_environment(env, "/env", "/env/bin/python") == ""


def test_the_package_is_a_program(tmp_path):
    """`python -m goodrun` is goodrun with that interpreter."""
    import goodrun

    env = {**os.environ, "PYTHONPATH": str(Path(goodrun.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-m", "goodrun", "--version"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == (f"goodrun {goodrun.__version__}", 0)


def in_a_namespace(*commands):
    """The words before a command that run it, as root, in a mount namespace after `commands`; skips where that is not allowed."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    return ("unshare", "-m", "sh", "-c", " && ".join(["mount --make-rprivate /", *commands, 'exec "$@"']), "sh")


NOBODY = (
    *("setpriv", "--reuid", "54321", "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    *("env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "-u", "XDG_STATE_HOME"),
)
"""A user without a name or a home; that it may read everything is for the sake of this test's own folders."""


@pytest.mark.parametrize("writable", [True, False])
def test_a_user_without_name_and_home(job, tmp_path, writable):
    """A container's numeric user on a read-only machine: --log-dir is place enough; without it one line names what is missing."""
    logs = tmp_path / "logs"
    logs.mkdir()
    os.chown(logs, 54321, 54321)
    prefix = (*in_a_namespace(f"mount --bind {logs} {logs}", "mount -o remount,ro,bind /"), *NOBODY)
    own = (sys.executable, "-m", "goodrun.elastic_runner", *map(str, PAIR), *(("--log-dir", str(logs)) if writable else ()))
    j = job(str(JOBS / "surroundings.py"), "reduce", prefix=(*prefix, *own), launcher="--", env={"PYTHONDONTWRITEBYTECODE": "1"})
    if writable:
        assert j.wait() == 0, j.err
        assert list(logs.glob("runs/*/events.jsonl"))
    else:
        assert j.wait() == 2, j.err
        (line,) = j.err.splitlines()
        assert "--run-dir" in line


def test_a_tiny_shared_memory_is_enough_for_goodrun(job):
    """1 MiB of /dev/shm: pages, ranks and collectives need none of it."""
    prefix = in_a_namespace("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    job(*PAIR, "surroundings.py", "reduce", prefix=prefix).ok()


def test_a_loader_that_ran_out_of_shared_memory_is_explained(job):
    """The last lines name /dev/shm and its size."""
    prefix = in_a_namespace("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    j = job(*PAIR, "surroundings.py", "load", prefix=prefix)
    assert j.wait(60) == 1
    (line,) = lines(j, "/dev/shm has 1 MiB")
    assert "--shm-size" in line


def test_shared_memory_is_only_blamed_where_it_may_have_failed(tmp_path):
    """Not for other failures, and not where there is plenty of it."""
    assert why_shared_memory("rank 0 raised ValueError: no") == ""
    assert "does not exist" in why_shared_memory("DataLoader worker is killed by signal: Bus error", str(tmp_path / "none"))


def unread(job, *argv):
    """A job whose output goes into a pipe that nobody reads; (job, its reading end)."""
    ours, theirs = os.pipe()
    try:
        return job(*PAIR, *argv, prefix=("bash", "-c", f'exec "$@" >&{theirs} 2>&{theirs}', "bash"), pass_fds=(theirs,)), ours
    finally:
        os.close(theirs)


def test_output_that_nobody_reads_stops_nobody_with_a_tee(job):
    """Ranks write to their logs, the copying alone waits for the reader; once he reads, the job ends."""
    j, pipe = unread(job, "--tee", 3, "--log-dir", "logs", "surroundings.py", "print")
    j.until(lambda: len(j.marks("printed.*")) == 2, 60)
    logs = list((j.where / "logs").rglob("stdout.log"))
    assert [p.stat().st_size for p in logs] == [2**20, 2**20]
    while os.read(pipe, 1 << 16):
        pass
    os.close(pipe)
    assert j.wait() == 0


def test_a_rank_that_waits_for_its_reader_is_told_from_one_that_hangs(job):
    """Straight into the pipe: the report says what it waits for."""
    j, pipe = unread(job, "--dry-run-detectors", "surroundings.py", "print and beat")
    hung = j.until(lambda: j.events(RankHung), 60)[0]
    os.close(pipe)
    j.proc.terminate()
    j.wait()
    assert any("blocked on output" in e and "stdout" in e for e in hung.evidence)


def test_a_rank_that_something_kills_again_and_again_is_told_with_its_memory(job):
    """SIGKILL alone explains nothing: its last size is named, the second death at one step is told, and not all restarts are spent."""
    j = job(*PAIR, "--max-restarts", 5, "surroundings.py", "killed at step 4").ok()
    first, second, third = j.events(Failed)
    for f in (first, second, third):
        assert "rank 1 killed by SIGKILL (nobody here sent it; out of memory? it last held 0." in f.cause
    assert "failed after step 4 for the second time" in j.err
    assert [a.world_size for a in j.events(AttemptStarted)] == [2, 2, 2, 1]


def test_ranks_that_are_deaf_and_stuck_are_gone_in_time(job):
    """SIGTERM blocked, a collective with a peer that never comes, an exit handler that waits for it too: grace + 5 s, then the restart."""
    j = job(*PAIR, "--shutdown-timeout", 2, "surroundings.py", "stuck and deaf").ok()
    (hung,) = j.events(RankHung)
    assert hung.rank == 1
    assert j.events(Stopped)[0].seconds < 2 + 5
    assert len(j.events(AttemptStarted)) == 2


def test_a_hang_after_the_last_step_is_no_failure_to_train(job):
    """One rank has left after the last step, the other cannot finish: nothing is restarted, and the words say that training was over."""
    j = job(*PAIR, "surroundings.py", "stuck at the end")
    assert j.wait(90) == 1
    (failed,) = j.events(Failed)
    assert failed.kind == "tear-down"
    assert "training was over: every rank had made step 4" in failed.cause
    assert "nothing is left to train" in j.events(RunEnded)[0].reason
