"""Several launchers on loopback stand for several nodes: they restart together, agree on the generation, and take a late one in."""

import os
import signal
import socket

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import AttemptStarted, FirstStep, WorkersSpawned


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def node(job, name, port, nnodes, *argv, more="", **env):
    flags = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "together"]
    conf = ["--rdzv-conf", "last_call_timeout=2,is_host=" + str(int(name == "a")) + more]
    return job(*flags, *conf, "--local-addr", "127.0.0.1", "--nproc-per-node", 1, *argv, name=name, env={"TEST_PAUSE": "0.05", **env})


def attempts(j):
    return [(e.attempt, e.world_size) for e in j.events(AttemptStarted)]


def test_two_nodes_restart_together(job):
    """A rank killed on one node: both come back, in the same new generation, with a store that no dead rank has written to."""
    port = free_port()
    a, b = (node(job, name, port, 2, "allreduce.py", 60) for name in "ab")
    a.until(lambda: a.events(FirstStep) and b.events(FirstStep), 60)
    os.kill(b.events(WorkersSpawned)[0].pids[0], signal.SIGKILL)
    a.ok()
    b.ok()
    assert attempts(a) == attempts(b)
    assert attempts(b)[0] == (0, 2)
    assert attempts(b)[-1][1] == 2
    assert len(attempts(b)) > 1


def test_a_late_node_is_taken_in(job):
    """A node that joins a running job makes it start over at the bigger size (under torchrun it kills the job)."""
    port = free_port()
    a = node(job, "a", port, "1:2", "allreduce.py", 150)
    a.until(lambda: a.events(FirstStep), 60)
    b = node(job, "b", port, "1:2", "allreduce.py", 20)
    b.until(lambda: b.events(FirstStep), 60)
    assert attempts(a)[-1][1] == attempts(b)[-1][1] == 2
    assert attempts(a)[-1][0] == attempts(b)[-1][0] > 0
    for j in (a, b):
        j.proc.send_signal(signal.SIGTERM)
    assert {a.wait(60), b.wait(60)} <= {143}


def test_ranks_on_two_nodes_leave_with_the_same_step(job, tmp_path):
    """SIGTERM to one of two launchers: the ranks of both agree on a step, save it together, and both launchers say so."""
    port = free_port()
    a, b = (node(job, name, port, 2, "train.py", 100_000, TEST_CHECKPOINTS=str(tmp_path / "shared")) for name in "ab")
    # a rank listens from the end of its first step on
    a.until(lambda: all(sum((j.where / n).read_text().count("\n") for n in j.marks("samples.*")) > 2 for j in (a, b)), 60)
    a.proc.terminate()
    assert (a.wait(60), b.wait(60)) == (143, 143)
    newest = found_in(tmp_path / "shared")[0]
    assert newest.fault is None and newest.manifest.world_size == 2
    for j in (a, b):
        assert f"goodrun: step {newest.step} was saved on the way out" in j.err
        [samples] = j.marks("samples.*")
        assert int((j.where / samples).read_text().splitlines()[-1].split()[0]) == newest.step


def test_a_node_that_is_asked_to_leave_leaves_and_the_other_goes_on(job, tmp_path):
    """SIGTERM to one of two launchers of a job that may be smaller: no step is lost, the other trains on from the step they left with."""
    port, more = free_port(), ",keep_alive_interval=1,keep_alive_max_attempt=3"
    a, b = (node(job, name, port, "1:2", "train.py", 100_000, more=more, TEST_CHECKPOINTS=str(tmp_path / "shared")) for name in "ab")
    a.until(lambda: all(sum((j.where / n).read_text().count("\n") for n in j.marks("samples.*")) > 2 for j in (a, b)), 60)
    b.proc.terminate()
    assert b.wait(60) == 143
    a.until(lambda: len(a.marks("samples.*")) == 2 and (a.where / a.marks("samples.*")[1]).read_text(), 60)
    left, goes_on = ((a.where / n).read_text().splitlines() for n in a.marks("samples.*"))
    assert int(goes_on[0].split()[0]) == int(left[-1].split()[0]) + 1
    assert [world for _, world in attempts(a)] == [2, 1]
    a.proc.terminate()
    assert a.wait(60) == 143
