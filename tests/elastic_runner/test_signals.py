"""Every way of stopping: ranks are asked once, get their time, and nothing is left running."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from goodrun.elastic_runner.events import Stopping, WorkersSpawned

JOBS = Path(__file__).parent / "jobs"


def up(job, ranks=2, generation=0):
    """Wait until the ranks are at work; their pids."""
    job.until(lambda: len(job.marks(f"up.r*.g{generation}")) == ranks)
    return [int((job.where / name).read_text()) for name in job.marks(f"up.r*.g{generation}")]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_terminated_job_ends_with_143(job):
    """SIGTERM reaches every rank once; the status says terminated, no traceback hides it, the record tells it."""
    j = job("--nproc-per-node", 2, "plain.py", "wait", "SIGTERM")
    up(j)
    j.proc.send_signal(signal.SIGTERM)
    j.until(lambda: len(j.marks("SIGTERM.r*.x1")) == 2)
    (j.where / "finish").touch()
    assert j.wait() == 143
    assert not j.marks("SIGTERM.r*.x2")
    assert "Traceback" not in j.err
    assert "stopped by SIGTERM" in j.err
    assert j.events()[-1].outcome == "stopped"
    assert j.events()[-1].status == 143


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_period(job):
    """--shutdown-timeout is what ranks get before SIGKILL."""
    j = job("--nproc-per-node", 2, "--shutdown-timeout", 1, "plain.py", "wait", "SIGTERM")
    up(j)
    begin = time.monotonic()
    j.proc.send_signal(signal.SIGTERM)
    assert j.wait(20) == 143
    assert 0.9 < time.monotonic() - begin < 8
    assert len(j.marks("SIGTERM.r*.x1")) == 2


def test_third_sigterm_leaves_no_rank(job):
    """However often it is asked, the launcher leaves only when its ranks are gone (torchrun's third SIGTERM orphans them)."""
    j = job("--nproc-per-node", 2, "--shutdown-timeout", 2, "plain.py", "wait", "SIGTERM")
    pids = up(j)
    for _ in range(3):
        j.proc.send_signal(signal.SIGTERM)
        time.sleep(0.1)  # separate signals: pending ones of a kind are merged
    assert j.wait(20) == 143
    assert all(gone(p) for p in pids)
    assert not j.marks("SIGTERM.r*.x2")


def test_second_ctrl_c_ends_everything_now(job):
    """The first Ctrl-C lets ranks save, the second means now."""
    j = job("--nproc-per-node", 2, "plain.py", "wait", "SIGINT")
    pids = up(j)
    os.killpg(j.proc.pid, signal.SIGINT)
    j.until(lambda: len(j.marks("SIGINT.r*.x1")) == 2)
    assert j.proc.poll() is None
    os.killpg(j.proc.pid, signal.SIGINT)
    assert j.wait(10) == 130
    assert all(gone(p) for p in pids)


def test_a_stop_signal_during_a_restart_is_not_lost(job):
    """A signal that comes while the old ranks are being stopped ends the job instead of the restart."""
    j = job("--nproc-per-node", 2, "--shutdown-timeout", 5, "plain.py", "stubborn")
    j.until(lambda: j.events(Stopping))
    j.proc.send_signal(signal.SIGTERM)
    assert j.wait(20) == 143
    assert not j.marks("up.r*.g1")


def test_a_launcher_that_inherited_an_ignored_sigchld_sees_its_ranks_end(job):
    """Some parents ignore SIGCHLD, and the kernel then reaps children by itself."""
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    job("--nproc-per-node", 2, "plain.py", "argv", prefix=(sys.executable, "-c", code)).ok()


def test_signals_to_handle_is_the_whole_list(job):
    """A signal that is not in --signals-to-handle has its default effect."""
    words = ("--nproc-per-node", 2, "--signals-to-handle", "SIGTERM", "plain.py", "wait")
    j = job(*words)
    pids = up(j)
    j.proc.send_signal(signal.SIGHUP)
    assert j.wait(20) == -signal.SIGHUP
    end = time.monotonic() + 5
    while not all(gone(p) for p in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(gone(p) for p in pids)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_scheduler_signals_reach_every_rank_and_end_nothing(job, name):
    """Slurm's warning is passed on; ranks that go on after it are not stopped."""
    j = job("--nproc-per-node", 2, "plain.py", "wait", name)
    up(j)
    j.proc.send_signal(getattr(signal, name))
    j.until(lambda: len(j.marks(f"{name}.r*.x1")) == 2)
    assert j.proc.poll() is None
    (j.where / "finish").touch()
    assert j.wait() == 0


def test_a_rank_without_a_handler_dies_of_the_passed_on_signal_and_the_job_stops(job):
    """SIGUSR1 ends a script that did not ask for it; that is a stop, not a failure to restart from."""
    j = job("--nproc-per-node", 2, "plain.py", "wait")
    pids = up(j)
    j.proc.send_signal(signal.SIGUSR1)
    assert j.wait(20) == 128 + signal.SIGUSR1
    assert all(gone(p) for p in pids)
    assert not j.marks("up.r*.g1")


def test_nohup_is_respected(job):
    """SIGHUP that was ignored at the start stays ignored."""
    j = job("--nproc-per-node", 2, "plain.py", "wait", prefix=("nohup",))
    up(j)
    j.proc.send_signal(signal.SIGHUP)
    j.proc.send_signal(signal.SIGCONT)
    (j.where / "finish").touch()
    assert j.wait() == 0


@pytest.mark.parametrize("no_python", [False, True])
def test_killing_the_launcher_takes_the_ranks_along(job, no_python):
    """SIGKILL to the launcher leaves no rank, be it a Python script or any other program."""
    command = ["--no-python", str(JOBS / "sleep.sh")] if no_python else ["plain.py", "wait"]
    j = job("--nproc-per-node", 2, *command)
    pids = up(j)
    j.proc.kill()
    j.proc.wait()
    end = time.monotonic() + 5
    while not all(gone(p) for p in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(gone(p) for p in pids)


def test_ranks_whose_launcher_is_dead_before_they_are_up_never_reach_the_script(job, living):
    """The kernel's tie to the launcher comes too late for them: they see for themselves that it is gone, and end."""
    slow = {"PYTHON_EXEC": str(JOBS / "late_python.sh"), "TEST_PYTHON": sys.executable}
    j = job("--nproc-per-node", 2, "plain.py", "wait", env=slow)
    j.until(lambda: len(j.events(WorkersSpawned)) == 1)
    j.proc.kill()
    j.proc.wait()
    (j.where / "go").touch()
    end = time.monotonic() + 10
    while (left := living()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left
    assert not j.marks("up.r*")


@pytest.mark.parametrize("kind", ["c10d", "static first", "static second"])
def test_ctrl_c_ends_the_wait_for_other_nodes(job, kind):
    """A launcher that waits for the other node gives the prompt back, and says what it waited for."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"],
        "static first": ["--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port],
        "static second": ["--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", port],
    }[kind]
    j = job("--nnodes", 2, *flags, "plain.py", "wait")
    j.until(lambda: j.events())
    time.sleep(1.0)  # into the store's own wait, of which there is no sign from outside
    os.killpg(j.proc.pid, signal.SIGINT)
    assert j.wait(8) == 130
    assert "while waiting for" in j.err


def test_ctrl_c_before_anything_started(job):
    """Ctrl-C while torch is still being imported: one line, no traceback."""
    j = job("--nproc-per-node", 2, "plain.py", "wait")
    j.until(lambda: Path(f"/proc/{j.proc.pid}/maps").read_text().count("libtorch") > 0, 20)
    os.killpg(j.proc.pid, signal.SIGINT)
    assert j.wait(20) == 130
    assert "Traceback" not in j.err
