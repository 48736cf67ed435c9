"""Several launchers on loopback stand for several nodes: they restart together, agree on the generation, lose one and take one in."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_runner.conftest import alive
from elastic_runner.nodes.told import one_at_a_time
from elastic_runner.test_survival import consumed, exactly_once

from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.events import (
    AttemptStarted,
    Decided,
    Failed,
    FirstStep,
    RankProgress,
    Restored,
    RoundFormed,
    SaveEnded,
    SnapshotCopied,
    WorkersSpawned,
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def flags(backend, name, ports, nnodes):
    if backend == "c10d":
        conf = ["--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=2,is_host=" + str(int(name == "a"))]
    else:
        conf = ["--rdzv-conf", "last_call_timeout=1"]
    return ["--nnodes", nnodes, "--rdzv-endpoint", ",".join(f"127.0.0.1:{p}" for p in ports), "--rdzv-id", "together", *conf]


def node(job, name, ports, nnodes, *argv, backend="goodrun", nproc=1, **env):
    where = ["--local-addr", "127.0.0.1", "--nproc-per-node", nproc]
    return job(*flags(backend, name, ports, nnodes), *where, *argv, name=name, env={"TEST_PAUSE": "0.05", **env})


def attempts(j):
    return [(e.attempt, e.world_size) for e in j.events(AttemptStarted)]


def rounds(j):
    return [(e.generation, e.nodes) for e in j.events(RoundFormed)]


def told_by(j):
    """What `goodrun goodput`, `history` and `top` say from this node."""
    found = {}
    for command in ("goodput", "history", "top"):
        argv = [sys.executable, "-m", "goodrun", command, str(j.run_dir), "--json"]
        found[command] = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout)
    return found["goodput"], found["history"], found["top"]


def one_story(jobs, blamed):
    """Each node tells of all slots, of the whole job's ranks, and of the rank that failed on another node."""
    for j in jobs:
        goodput, history, top = told_by(j)
        assert goodput["nodes"] == len(jobs)
        assert goodput["slot_s"] == pytest.approx(goodput["wall_s"], rel=0.01)  # a slot on each node
        assert goodput["buckets"]["productive"] > 0
        assert [r["rank"] for r in top["ranks"]] == list(range(len(jobs)))
        assert len({r["node"] for r in top["ranks"]}) == len(jobs)
        assert history["lives"] == 1
        assert blamed in history["attempts"][0]["cause"]
        assert history["attempts"][-1]["kind"] == "finished"


@pytest.mark.parametrize("backend", ["c10d", "goodrun"])
def test_two_nodes_restart_together(job, backend):
    """A rank killed on one node: both come back, in the same new generation, with a store that no dead rank has written to."""
    ports = [free_port()]
    a, b = (node(job, name, ports, 2, "allreduce.py", 60, backend=backend) for name in "ab")
    a.until(lambda: a.events(FirstStep) and b.events(FirstStep), 60)
    os.kill(b.events(WorkersSpawned)[0].pids[0], signal.SIGKILL)
    a.ok()
    b.ok()
    assert attempts(a) == attempts(b)
    assert attempts(b)[0] == (0, 2)
    assert attempts(b)[-1][1] == 2
    assert len(attempts(b)) > 1
    assert rounds(a) == rounds(b)
    if backend == "goodrun":
        rank = b.events(AttemptStarted)[0].first_rank
        one_story([a, b], f"rank {rank} killed by SIGKILL")


@pytest.mark.parametrize("backend", ["c10d", "goodrun"])
def test_a_late_node_is_taken_in(job, backend):
    """A node that joins a running job makes it start over at the bigger size (under torchrun it kills the job)."""
    ports = [free_port()]
    a = node(job, "a", ports, "1:2", "allreduce.py", 150, backend=backend)
    a.until(lambda: a.events(FirstStep), 60)
    b = node(job, "b", ports, "1:2", "allreduce.py", 20, backend=backend)
    b.until(lambda: b.events(FirstStep), 60)
    assert attempts(a)[-1][1] == attempts(b)[-1][1] == 2
    assert attempts(a)[-1][0] == attempts(b)[-1][0] > 0
    for j in (a, b):
        j.proc.send_signal(signal.SIGTERM)
    assert {a.wait(60), b.wait(60)} <= {143}


def test_ranks_on_two_nodes_leave_with_the_same_step(job, tmp_path):
    """SIGTERM to one of two launchers: the ranks of both agree on a step, save it together, and both launchers say so."""
    ports = [free_port()]
    a, b = (node(job, name, ports, 2, "train.py", 100_000, TEST_CHECKPOINTS=str(tmp_path / "shared")) for name in "ab")
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


@pytest.mark.parametrize("who", ["a", "c"])
def test_a_launcher_is_killed(job, tmp_path, who):
    """Whether it leads or not: the others go on in a round of their own, no sample is lost or repeated, the record says who was lost."""
    ports = [free_port() for _ in range(3)]
    env = {"TEST_DIR": str(tmp_path), "TEST_PAUSE": "0.1"}
    jobs = {name: node(job, name, ports, "2:3", "train.py", 48, **env) for name in "abc"}
    jobs["a"].until(lambda: all(j.events(FirstStep) and attempts(j)[-1][1] == 3 for j in jobs.values()), 60)
    led = jobs["a"].events(RoundFormed)[-1]
    jobs["a"].until(lambda: (tmp_path / "checkpoints").exists() and any((tmp_path / "checkpoints").iterdir()))
    jobs[who].proc.kill()
    for j in (rest := [j for name, j in jobs.items() if name != who]):
        j.ok()
        assert [w for _, w in attempts(j)][-2:] == [3, 2]  # one that was slow to start may have come in later
        assert "lost" in j.events(Decided)[-1].reason
        assert set(j.events(RoundFormed)[-1].nodes) < set(led.nodes)
    exactly_once(consumed(tmp_path))
    one_at_a_time(tmp_path)
    assert rounds(rest[0]) == rounds(rest[1])


def test_uneven_nodes(job):
    """Two ranks here, one there; when the one loses a slot, that node alone shrinks."""
    ports = [free_port()]
    a = node(job, "a", ports, 2, "--chaos", "slot-lost:rank=1@step=9", "allreduce.py", 60, nproc=2)
    b = node(job, "b", ports, 2, "allreduce.py", 60)
    a.ok()
    b.ok()
    assert [w for _, w in attempts(a)] == [w for _, w in attempts(b)] == [3, 2]
    assert [len(e.slots) for e in a.events(AttemptStarted)] == [2, 1]
    assert [len(e.slots) for e in b.events(AttemptStarted)] == [1, 1]


def test_nodes_restart_from_each_others_memory(job, tmp_path):
    """A node loses one of its two slots: three parts of the newest snapshot lie on two nodes, and two ranks go on from them, exactly."""
    ports = [free_port()]
    env = {"TEST_DIR": str(tmp_path), "TEST_PAUSE": "0.1"}
    a = node(job, "a", ports, 2, "--chaos", "slot-lost:rank=1@step=14", "train.py", 32, nproc=2, **env)
    b = node(job, "b", ports, 2, "train.py", 32, **env)
    a.ok()
    b.ok()
    assert [w for _, w in attempts(a)] == [3, 2]
    assert "out of the keeper's memory, on several nodes" in a.err + b.err
    assert a.events(Restored)[0].step == b.events(Restored)[0].step == 10
    exactly_once(consumed(tmp_path))
    assert len({(tmp_path / f"final.l0.r{r}").read_text() for r in (0, 1)}) == 1


def test_a_replica_that_went_astray_on_another_node_is_found(job, tmp_path):
    """One bit of the model of the second node's last rank: its slot is blamed, all go back before it, each on another device.

    The checkpoints after it are marked by the node that has rank 0 now, whichever found them out; the record of either node tells it.
    """
    ports = [free_port()]
    env = {"TEST_DIR": str(tmp_path), "TEST_PAUSE": "0.1"}
    a = node(job, "a", ports, 2, "--node-rank", 0, "train.py", 60, "replicas", **env)
    plan = ("--chaos", "param-flip:rank=2@step=12")
    b = node(job, "b", ports, 2, "--node-rank", 1, *plan, "train.py", 60, "replicas", nproc=2, **env)
    a.ok()
    b.ok()
    (failed,) = b.events(Failed)
    assert (failed.kind, failed.rank, failed.slot, a.events(Failed)) == ("replicas", 2, 1, [])
    assert [[(e.world_size, e.first_rank) for e in j.events(AttemptStarted)] for j in (a, b)] == [[(3, 0), (3, 2)], [(3, 1), (3, 0)]]
    assert a.events(Restored)[0].step == b.events(Restored)[0].step <= 10 < failed.step
    assert f"equal at step {failed.step} now, with the ranks on other devices: slot 1 is suspected" in b.err
    assert len({(tmp_path / f"final.l0.r{r}").read_text() for r in range(3)}) == 1
    exactly_once(consumed(tmp_path))
    for j in (a, b):
        _, history, top = told_by(j)
        cause, node_of = history["attempts"][0]["cause"], {r["rank"]: r["node"] for r in top["ranks"]}
        assert node_of[0] == node_of[1] != node_of[2]  # of two launchers on one host the second is host#2
        assert cause == f"the model of rank 2 is not that of the others (after step {failed.step}, slot 1) on {node_of[0]}"


def three_nodes_one_of_them_lost(job, tmp_path, who, *options):
    """One of three nodes cannot write step 10 or later ones; it is killed whole (launcher, keeper, ranks) when step 15 is in memory.

    Returns the other two, and the newest step that storage had.
    """
    ports, jobs = [free_port() for _ in range(3)], {}
    for rank, name in enumerate("abc"):
        words = ["--node-rank", rank, *options, *(["--chaos", "eio:for=1h@step=10"] if name == who else []), "train.py", 48]
        env = {"TEST_DIR": str(tmp_path), "TEST_PAUSE": "0.1", "TEST_NODE": str(tmp_path / name)}
        jobs[name] = node(job, name, ports, "2:3", *words, **env)
    there = SnapshotCopied if options else RankProgress
    jobs["a"].until(lambda: all(steps(j, there) >= 15 for j in jobs.values()), 60)
    stored = max(found.step for found in found_in(tmp_path / "checkpoints") if found.fault is None)
    lost = alive(f"TEST_NODE={tmp_path / who}")
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in lost:
            os.kill(pid, signum)
    return [j.ok() for name, j in jobs.items() if name != who], stored


def steps(j, kind):
    return max((e.step if kind is SnapshotCopied else max(e.steps) for e in j.events(kind)), default=-1)


@pytest.mark.parametrize("who", ["a", "c"])
def test_a_lost_nodes_parts_are_restored_from_the_next_nodes_memory(job, tmp_path, who):
    """Storage has step 5; the others go on from step 15 or later, of which a part was in memory on the lost node, and write it, too."""
    rest, stored = three_nodes_one_of_them_lost(job, tmp_path, who, "--snapshot-replicas", 1)
    assert stored == 5
    restored = [j.events(Restored)[-1].step for j in rest]
    assert min(restored) == max(restored) >= 15
    assert "out of the keeper's memory, on several nodes" in "".join(j.err for j in rest)
    for j in rest:
        assert any(e.step == restored[0] and e.fate == "durable" for e in j.events(SaveEnded))
    exactly_once(consumed(tmp_path))
    one_at_a_time(tmp_path)


def test_without_copies_a_lost_node_costs_what_storage_has_not(job, tmp_path):
    """The same loss without --snapshot-replicas: back to step 5."""
    rest, stored = three_nodes_one_of_them_lost(job, tmp_path, "c")
    assert [j.events(Restored)[-1].step for j in rest] == [stored, stored] == [5, 5]
    exactly_once(consumed(tmp_path))


def test_one_node_whose_storage_fails_for_a_while(job, tmp_path):
    """What it gives up the other does not wait for, once it has gone on: the newest is written, and training ends well on both."""
    ports = [free_port()]
    env = {"TEST_DIR": str(tmp_path)}
    a = node(job, "a", ports, 2, "--node-rank", 0, "train.py", 60, **env)
    b = node(job, "b", ports, 2, "--node-rank", 1, "--chaos", "eio:for=2s@step=10", "train.py", 60, **env)
    a.ok()
    b.ok()
    assert any("another node has given it up" in e.why for e in a.events(SaveEnded))
    assert found_in(tmp_path / "checkpoints")[0].step == 60
    exactly_once(consumed(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_one_node_whose_storage_fails_for_good(job, tmp_path):
    """Each save is given up after a minute or so; training goes on to its end, whose status tells that the last checkpoint is not there."""
    ports = [free_port()]
    env = {"TEST_DIR": str(tmp_path)}
    a = node(job, "a", ports, 2, "--node-rank", 0, "train.py", 25, **env)
    b = node(job, "b", ports, 2, "--node-rank", 1, "--chaos", "eio:for=1h@step=10", "train.py", 25, **env)
    assert (a.wait(500), b.wait(60)) == (1, 1)
    assert any("nothing has come from the other nodes" in e.why for e in a.events(SaveEnded))
    assert [f.step for f in found_in(tmp_path / "checkpoints") if f.manifest is not None] == [5]
    assert sorted(consumed(tmp_path)) == list(range(1, 26))


@pytest.mark.exhaustive
def test_no_false_alarm_on_a_busy_machine(job):
    """Three launchers and their ranks beside ten processes that only burn time (fewer, if others do so already): one round, to the end."""
    ports = [free_port() for _ in range(3)]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(max(10 - int(os.getloadavg()[0]), 0))]
    try:
        jobs = [node(job, name, ports, 3, "allreduce.py", 400) for name in "abc"]
        for j in jobs:
            j.ok(400)
    finally:
        for one in busy:
            one.kill()
            one.wait(10)
    print(f"load {os.getloadavg()[0]:.0f}")
    for j in jobs:
        assert len(rounds(j)) == 1
        assert not j.events(Decided)


def test_a_node_that_is_asked_to_leave_leaves_and_the_other_goes_on(job, tmp_path):
    """SIGTERM to one of two launchers of a job that may be smaller: no step is lost, the other trains on from the step they left with."""
    ports = [free_port(), free_port()]
    a, b = (node(job, name, ports, "1:2", "train.py", 100_000, TEST_CHECKPOINTS=str(tmp_path / "shared")) for name in "ab")
    a.until(lambda: all(sum((j.where / n).read_text().count("\n") for n in j.marks("samples.*")) > 2 for j in (a, b)), 60)
    b.proc.terminate()
    assert b.wait(60) == 143
    a.until(lambda: len(a.marks("samples.*")) == 2 and (a.where / a.marks("samples.*")[1]).read_text(), 60)
    left, goes_on = ((a.where / n).read_text().splitlines() for n in a.marks("samples.*"))
    assert int(goes_on[0].split()[0]) == int(left[-1].split()[0]) + 1
    assert [world for _, world in attempts(a)] == [2, 1]
    a.proc.terminate()
    assert a.wait(60) == 143


def test_a_node_whose_device_is_gone_leaves_and_the_other_goes_on(job):
    """Its only slot is lost: it ends with 69 and signs off; the other node does not wait for it."""
    ports = [free_port()]
    a = node(job, "a", ports, "1:2", "allreduce.py", 60)
    b = node(job, "b", ports, "1:2", "--chaos", "slot-lost:rank=1@step=9; slot-lost:rank=0@step=9", "allreduce.py", 60)
    assert b.wait(100) == 69, b.err
    a.ok()
    assert [w for _, w in attempts(a)] == [2, 1]
    assert any(word in a.events(RoundFormed)[1].reason for word in ("has left: ", "which led the job"))


def test_a_script_that_cannot_work_ends_the_job_on_all_nodes(job):
    """One node says so, and the other need not find out for itself."""
    ports = [free_port()]
    a = node(job, "a", ports, 2, "plain.py", "wait")
    b = node(job, "b", ports, 2, "cannot_start.py")
    assert b.wait(100) == 1, b.err
    assert a.wait(30) == 1, a.err
    assert "could not start" in b.err
    assert "vm: rank" in a.err.replace(socket.gethostname(), "vm") or "a_module_that_nobody_has" in a.err


def test_plain_torchrun_meets_through_goodruns_backend(job, tmp_path):
    """Stock torchrun finds the backend by its entry point: two agents form, and restart together when a rank is killed."""
    told = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    name, function = re.search(r'"torchrun.handlers"\]\n(\w+) = "([^"]+)"', told).groups()
    installed = tmp_path / "site" / "goodrun-0.dist-info"  # what an installation leaves behind; here there may be none
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: goodrun\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torchrun.handlers]\n{name} = {function}\n")
    path = os.pathsep.join([str(installed.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["--nnodes", 2, "--rdzv-backend", name, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "plain"]
    words += ["--log-dir", tmp_path / "logs", "--max-restarts", 3, "--local-addr", "127.0.0.1", "--nproc-per-node", 1, "dies_once.py"]
    env = {"PYTHONPATH": path, "TEST_DIR": str(tmp_path)}
    a, b = (job(*words, launcher="torchrun", name=where, env=env) for where in "ab")
    a.ok()
    b.ok()
    assert sorted(path.name for path in tmp_path.glob("met.*")) == ["met.0", "met.1"]
