"""What happens after a failure, with real processes: who goes, who comes back, with how many, and what is said."""

import re
import subprocess
import time

import pytest

from goodrun.elastic_runner.events import AttemptStarted, Decided, Failed, RunEnded, Stopped


def test_logs_of_every_attempt_are_kept(job):
    """Each generation has a log folder of its own."""
    j = job("--nproc-per-node", 2, "--redirects", 3, "--log-dir", "logs", "plain.py", "print").ok()
    found = {p.parts[-3]: p.read_text() for p in (j.where / "logs").rglob("0/stdout.log")}
    assert found == {"attempt_0": "hello from generation 0\n", "attempt_1": "hello from generation 1\n"}


def test_a_sibling_that_ignores_sigterm_does_not_hold_up_the_restart(job):
    """On the way to a restart ranks get --shutdown-timeout, not a fixed 30 s."""
    j = job("--nproc-per-node", 2, "--shutdown-timeout", 1, "plain.py", "stubborn").ok()
    (stopped,) = [e for e in j.events(Stopped) if e.killed]
    assert stopped.killed == (0,)
    assert 0.9 < stopped.seconds < 5


def test_ranks_that_stand_in_a_collective_are_not_waited_for(job):
    """Python runs no handler there, so whatever the grace there is nothing to wait for: they are killed at once."""
    j = job("--nproc-per-node", 3, "--shutdown-timeout", 50, "deadlock.py").ok()
    (stopped,) = [e for e in j.events(Stopped) if e.killed]
    assert stopped.killed in ((0, 2), (0,), (2,))  # the second may die of the first one's end
    assert stopped.seconds < 10
    assert len(j.events(AttemptStarted)) == 2


def test_helpers_of_a_dead_rank_do_not_survive_the_restart(job):
    """What a killed rank had started is gone before its successor starts, though it made a process group of its own."""
    j = job("--nproc-per-node", 2, "plain.py", "helper").ok()
    for name in j.marks("helper.r*.g0"):
        pid = (j.where / name).read_text()
        assert not _is_sleep(pid)


def _is_sleep(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline") as f:
            return f.read().startswith("sleep\0")
    except OSError:
        return False


def test_a_script_that_cannot_start_is_started_twice_and_shows_its_traceback(job):
    """An import error is no reason for ten restarts; its traceback is in the last lines."""
    j = job("--nproc-per-node", 1, "--max-restarts", 50, "cannot_start.py")
    assert j.wait() == 1
    assert len(j.events(AttemptStarted)) == 2
    assert "No module named 'a_module_that_nobody_has'" in "\n".join(j.err.splitlines()[-4:])
    assert "could not start" in j.err.splitlines()[-1]


def test_the_exception_is_on_the_console_even_when_output_goes_to_files(job):
    """Rank and exception are named without any decorator in the script; the record has them too."""
    j = job("--nproc-per-node", 2, "--max-restarts", 0, "--redirects", 3, "plain.py", "raise")
    assert j.wait() == 1
    assert re.search(r"FAILED: rank 1 raised ValueError: data shard 17 has no rows", j.err)
    failed = j.events(Failed)[0]
    assert failed.rank == 1
    assert "data shard 17 has no rows" in failed.message
    assert j.events(RunEnded)[0].status == 1


@pytest.mark.parametrize("flags", [[], ["--standalone"], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]])
def test_a_machine_whose_own_name_does_not_resolve(job, flags):
    """A single node needs nobody's name: the ranks meet on loopback."""
    if subprocess.run(["unshare", "-u", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a UTS namespace")
    renamed = ("unshare", "-u", "sh", "-c", 'hostname trainer-without-dns-entry; exec "$@"', "sh")
    job("--nproc-per-node", 2, *flags, "allreduce.py", 3, prefix=renamed).ok(40)


def test_max_restarts_is_a_cap(job):
    """--max-restarts 0 means no restart, as with torchrun."""
    j = job("--nproc-per-node", 2, "--max-restarts", 0, "plain.py", "exit", 3)
    assert j.wait() == 1
    assert len(j.events(AttemptStarted)) == 1
    assert "rank 1 exited with status 3" in j.err


def test_a_slot_that_keeps_killing_its_worker_is_left_out(job):
    """After three deaths in a row the job goes on without the slot, and says which and why."""
    j = job("--nproc-per-node", 3, "plain.py", "die-in-slot", 2, 2).ok()
    assert [a.slots for a in j.events(AttemptStarted)] == [(0, 1, 2)] * 3 + [(0, 1)]
    assert "slot 2 failed 3 times in a row: going on with 2 of 3" in j.err


def test_a_spare_takes_the_place_of_a_slot_that_is_left_out(job):
    """With --spares the world keeps its size."""
    j = job("--nproc-per-node", 2, "--spares", 1, "plain.py", "die-in-slot", 1, 2)
    j.until(lambda: len(j.events(AttemptStarted)) == 4)
    assert j.events(AttemptStarted)[-1].slots == (0, 2)
    j.proc.terminate()
    j.wait()


def test_min_nproc_forbids_shrinking(job):
    """--min-nproc = nproc: the job goes on trying at full size until the budget is gone."""
    j = job("--nproc-per-node", 2, "--min-nproc", 2, "--max-restarts", 4, "plain.py", "die-in-slot", 1, 1)
    assert j.wait() == 1
    assert {a.slots for a in j.events(AttemptStarted)} == {(0, 1)}
    assert len(j.events(AttemptStarted)) == 5
    assert j.events(Decided)[-1].action == "give up"


def test_a_rank_that_leaves_early_is_named(job):
    """A rank that ends with 0 while its peers stay is said, not punished: scripts may end unevenly."""
    j = job("--nproc-per-node", 2, "plain.py", "exit", 0)
    j.until(lambda: "rank 1 left with status 0" in j.err, 90)
    assert j.proc.poll() is None
    j.proc.terminate()
    begin = time.monotonic()
    assert j.wait() == 143
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("how", ["closes", "thread"])
def test_a_rank_that_raises_is_to_blame_though_it_has_not_ended(job, how):
    """A peer that dies because it has gone, or waits for it for ever, is not the first failure."""
    j = job("--nproc-per-node", 2, "raises_slowly.py", how).ok()
    (failed,) = j.events(Failed)
    assert (failed.kind, failed.rank) == ("exception", 1)
    assert "ValueError: mine" in failed.cause
