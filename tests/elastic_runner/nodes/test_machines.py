"""Three machines with addresses of their own: network, process and host names in namespaces, joined by cables that can be cut.

Made and removed by the tests; skipped where that is not allowed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_runner.conftest import Job
from elastic_runner.nodes.told import one_at_a_time, stretches
from elastic_runner.test_survival import consumed, exactly_once

from goodrun.elastic_runner.events import AttemptStarted, Decided, FirstStep, RankProgress, RoundFormed, Stopping, WorkersSpawned

PORT = 29500


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Machines:
    """Namespaces 0, 1, 2 … and the bridge between them."""

    def __init__(self, count: int) -> None:
        self.tag, self.count = f"gd{os.getpid() % 10000}", count
        self.net = f"10.77.{os.getpid() % 250 + 1}"

    def make(self) -> None:
        ip("link", "add", f"{self.tag}b", "type", "bridge")
        ip("link", "set", f"{self.tag}b", "up")
        for n in range(self.count):
            ip("netns", "add", f"{self.tag}n{n}")
            ip("link", "add", f"{self.tag}v{n}", "type", "veth", "peer", "name", "eth0", "netns", f"{self.tag}n{n}")
            ip("link", "set", f"{self.tag}v{n}", "master", f"{self.tag}b", "up")
            ip("-n", f"{self.tag}n{n}", "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
            ip("-n", f"{self.tag}n{n}", "link", "set", "lo", "up")
            ip("-n", f"{self.tag}n{n}", "link", "set", "eth0", "up")

    def remove(self) -> None:
        for n in range(self.count):
            subprocess.run(["ip", "netns", "del", f"{self.tag}n{n}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{self.tag}v{n}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.tag}b"], capture_output=True)

    def address(self, n: int) -> str:
        return f"{self.net}.{n + 1}"

    def inside(self, n: int) -> tuple[str, ...]:
        """The words before a command that is to run on machine n, and to die with it."""
        shell = f'hostname node{n}; "$@"; exit $?'
        return (
            *("nsenter", f"--net=/run/netns/{self.tag}n{n}", "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", shell, "machine"),
        )

    def cable(self, n: int, state: str) -> None:
        """Cut machine n's cable ("down"), or mend it ("up")."""
        ip("link", "set", f"{self.tag}v{n}", state)


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines(3)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as e:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(e, 'stderr', e)}")
    yield made
    made.remove()


class Cluster:
    """A job on the machines; what they share is a folder."""

    def __init__(self, job, machines: Machines, where: Path, steps: int, nnodes: str = "1:3", pause: float = 0.1) -> None:
        self.job, self.machines, self.where, self.steps, self.nnodes, self.pause = job, machines, where, steps, nnodes, pause
        self.jobs: dict[int, Job] = {}
        self.every: list[Job] = []
        for n in range(machines.count):
            self.start(n)

    def start(self, n: int) -> Job:
        endpoint = ",".join(f"{self.machines.address(i)}:{PORT}" for i in range(3))
        flags = ["--nnodes", self.nnodes, "--rdzv-endpoint", endpoint, "--rdzv-id", "machines", "--rdzv-conf", "last_call_timeout=15"]
        env = {"TEST_DIR": str(self.where), "TEST_PAUSE": str(self.pause), "GLOO_SOCKET_IFNAME": "eth0", "GOODRUN_JOB_SECRET": "s3"}
        name = f"node{n}.{sum(j.where.name.startswith(f'node{n}.') for j in self.every)}"
        one = self.job(*flags, "--nproc-per-node", 1, "train.py", self.steps, prefix=self.machines.inside(n), name=name, env=env)
        self.jobs[n] = one
        self.every.append(one)
        return one

    def processes(self, n: int) -> list[int]:
        """The processes of machine n, the agent's shell first."""
        found, todo = [], [self.jobs[n].proc.pid]
        while todo:
            pid = todo.pop(0)
            found.append(pid)
            try:
                todo += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                continue
        return found

    def agent(self, n: int) -> int:
        """The launcher of machine n: the only child of the shell that stands for the machine."""
        return self.processes(n)[2]

    def until_all_step(self, nodes, more_than: int = -1, timeout: float = 90) -> float:
        """Wait until the `nodes` make steps in one generation later than `more_than`; returns when its first was made."""
        jobs = [self.jobs[n] for n in nodes]

        def there():
            newest = [j.events(FirstStep)[-1].attempt if j.events(FirstStep) else -1 for j in jobs]
            worlds = [j.events(AttemptStarted)[-1].world_size for j in jobs if j.events(AttemptStarted)]
            return len(set(newest)) == 1 and newest[0] > more_than and worlds == [len(jobs)] * len(jobs)

        jobs[0].until(there, timeout)
        return max(j.events(FirstStep)[-1].first_step_t for j in jobs)

    def until_saved(self) -> None:
        """Wait until all nodes know of a checkpoint that was begun in their newest generation."""

        def saved(j: Job) -> bool:
            begun = j.events(FirstStep)[-1]
            return any(e.durable_step > begun.step for e in j.events(RankProgress) if e.attempt == begun.attempt)

        self.jobs[0].until(lambda: all(saved(j) for j in self.jobs.values()), 90)

    def generation(self, n: int) -> int:
        return self.jobs[n].events(AttemptStarted)[-1].attempt

    def leader(self) -> int:
        r = self.jobs[min(self.jobs)].events(RoundFormed)[-1]
        return int(r.leader.split(":")[0].removeprefix("node"))

    def cease(self) -> None:
        """Kill the job in the middle of its work; what it has done so far is exact."""
        for one in self.jobs.values():
            one.proc.kill()
            one.proc.wait(20)
        one_at_a_time(self.where)
        done = consumed(self.where)
        exactly_once({s: done[s] for s in range(1, max(done) // 8 * 8 + 1)})

    def done(self, nodes) -> None:
        """The `nodes` end well, the samples are exact, and no two generations trained at once."""
        for n in nodes:
            self.jobs[n].ok(200)
        exactly_once(consumed(self.where))
        assert sorted(consumed(self.where)) == list(range(1, self.steps + 1))
        one_at_a_time(self.where)


OTHERS = [("node", False), ("cut", False), *((what, leads) for what in ("agent", "frozen", "silent") for leads in (False, True))]


def ranks(c: Cluster, n: int) -> list[int]:
    """The ranks on machine n; the record has their ids as the machine itself sees them."""
    inside = c.jobs[n].events(WorkersSpawned)[-1].pids
    return [p for p in c.processes(n)[3:] if id_inside(p) in inside]


def id_inside(pid: int) -> int:
    """A process's id in the innermost name space; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")))


def strike(c: Cluster, what: str, n: int) -> None:
    if what == "node":
        c.jobs[n].proc.kill()
    elif what == "agent":
        os.kill(c.agent(n), signal.SIGKILL)
    elif what == "worker":
        os.kill(ranks(c, n)[-1], signal.SIGKILL)
    elif what == "frozen":
        for pid in c.processes(n):
            os.kill(pid, signal.SIGSTOP)
    elif what == "cut":
        c.machines.cable(n, "down")
    else:
        c.machines.cable(n, "down")
        c.jobs[n].proc.kill()


@pytest.mark.parametrize(
    ("what", "leads"),
    [
        ("node", True),
        ("cut", True),
        *[pytest.param(what, leads, marks=pytest.mark.exhaustive) for what, leads in OTHERS],
    ],
)
def test_a_node_is_lost(job, machines, tmp_path, what, leads):
    """Whatever is done to it, and whether it leads: all others notice within 2 s, train on without it, and the record tells."""
    comes_back = what in ("frozen", "cut")
    c = Cluster(job, machines, tmp_path, 100000 if comes_back else 80)
    c.until_all_step(range(3))
    lost = next(n for n in range(3) if (n == c.leader()) == leads)
    rest = [n for n in range(3) if n != lost]
    c.jobs[rest[0]].until(lambda: any((tmp_path / "checkpoints").glob("step-*")))
    hit = time.monotonic()
    strike(c, what, lost)
    back = c.until_all_step(rest, 0)
    noticed = max(next(e.t for e in c.jobs[n].events(Decided)) for n in rest)
    print(f"{what}, leads {leads}: noticed after {noticed - hit:.2f} s, first step after {back - hit:.2f} s")
    assert noticed - hit < 2.0 + 1.0  # the second is for this machine's load
    assert back - hit < 40  # nothing waits a minute for what a lost node owes
    assert all("was lost" in c.jobs[n].events(RoundFormed)[1].reason for n in rest)
    if what == "frozen":
        for pid in c.processes(lost):
            os.kill(pid, signal.SIGCONT)
    if what in ("cut", "silent"):
        machines.cable(lost, "up")
    if not comes_back:
        c.done(rest)
        return
    c.until_all_step(range(3), c.generation(rest[0]))  # it finds itself left behind, says so, and comes back
    told = [e for e in c.jobs[lost].events(Stopping) if e.signal == "SIGKILL"]
    assert "no word from a majority" in told[0].why
    c.until_saved()
    c.cease()


def paced(job, machines, where, launcher) -> float:
    """Three nodes under `launcher`, one of which is killed: seconds to the first step of the other two."""
    where.mkdir()
    # without the last word torchrun's survivors never step again
    env = {"TEST_DIR": str(where), "GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    jobs = []
    for n in range(3):
        flags = ["--nnodes", "1:3", "--rdzv-id", launcher, "--local-addr", machines.address(n), "--nproc-per-node", 1]
        if launcher == "torchrun":
            flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines.address(0)}:{PORT}", "--rdzv-conf", f"is_host={int(n == 0)}"]
            flags += ["--max-restarts", 3, "--log-dir", where / f"logs{n}"]
        else:
            flags += ["--rdzv-endpoint", ",".join(f"{machines.address(i)}:{PORT}" for i in range(3))]
        jobs.append(job(*flags, "paced.py", launcher=launcher, prefix=machines.inside(n), name=f"{launcher}{n}", env=env))

    def step_at(world, since=0.0):
        told = [line.split() for line in (where / "paced").read_text().splitlines()] if (where / "paced").exists() else []
        return next((float(t) for t, w in (x for x in told if len(x) == 2) if int(w) == world and float(t) > since), None)

    jobs[0].until(lambda: step_at(3), 120)
    hit = time.monotonic()
    jobs[2].proc.kill()
    back = jobs[0].until(lambda: step_at(2, hit), 180) - hit
    for one in jobs:
        one.proc.kill()
        one.proc.wait(20)
    return back


@pytest.mark.exhaustive
def test_a_lost_node_beside_torchrun(job, machines, tmp_path):
    """The same job on the same machines: a node is killed, and the others step again in a quarter of torchrun's time at least."""
    ours, theirs = (paced(job, machines, tmp_path / launcher, launcher) for launcher in ("goodrun", "torchrun"))
    print(f"first step after a node was killed: goodrun {ours:.2f} s, torchrun {theirs:.2f} s")
    assert ours < theirs / 4


@pytest.mark.exhaustive
def test_a_worker_is_killed(job, machines, tmp_path):
    """All three start over together."""
    c = Cluster(job, machines, tmp_path, 60)
    c.until_all_step(range(3))
    strike(c, "worker", 1)
    c.until_all_step(range(3), 0)
    c.done(range(3))


@pytest.mark.exhaustive
def test_a_node_joins(job, machines, tmp_path):
    """A new agent on a machine whose agent was killed comes in at the next checkpoint."""
    c = Cluster(job, machines, tmp_path, 100000)
    c.until_all_step(range(3))
    c.jobs[2].proc.kill()
    c.until_all_step([0, 1], 0)
    c.start(2)
    c.until_all_step(range(3), c.generation(0))
    assert "joins" in c.jobs[0].events(RoundFormed)[-1].reason
    c.cease()


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_twenty_minutes_at_random(job, machines, tmp_path):
    """One thing after the other happens to a random node and is undone again; the job trains on, exactly, and never in two halves."""
    dice = random.Random(int(os.environ.get("TEST_SEED", "1")))
    end = time.monotonic() + float(os.environ.get("TEST_MINUTES", "20")) * 60
    c = Cluster(job, machines, tmp_path, 100000, pause=0.05)
    c.until_all_step(range(3))
    while time.monotonic() < end:
        what, n = dice.choice(["node", "agent", "frozen", "cut", "silent", "worker"]), dice.randrange(3)
        rest, before = [x for x in range(3) if x != n], max(c.generation(x) for x in range(3))
        print(what, n, f"leads {n == c.leader()}", flush=True)
        strike(c, what, n)
        if what != "worker":
            c.until_all_step(rest, before)
        if what == "frozen":
            for pid in c.processes(n):
                os.kill(pid, signal.SIGCONT)
        if what in ("cut", "silent"):
            machines.cable(n, "up")
        if what in ("node", "agent", "silent"):
            c.jobs[n].proc.wait(20)
            c.start(n)
        c.until_all_step(range(3), before)
        c.until_saved()  # a machine that is lost again and again before that is sent away
    c.cease()
    assert len(stretches(tmp_path)) > 5
