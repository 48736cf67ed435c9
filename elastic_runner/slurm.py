"""What Slurm tells a step's processes, as the options that nobody need give: how many nodes, where they meet, what the run is called."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .errors import UsageError

_RENDEZVOUS = {
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": "",
    "standalone": False,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": None,
}
"""torch's options that say where nodes meet, as they are where nobody gave one."""
_HOSTS = 3
"""Nodes at which the others may meet: one of them may be lost."""
_FIRST_PORT, _PORTS = 20_000, 10_000
"""Below the ports that Linux gives to outgoing connections."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step of a Slurm job in which this launcher is a task, as the one on its node."""

    job: str
    """1234, or 1234_5 for a task of an array."""
    number: int
    """The job's own number, which differs among the tasks of an array."""
    step: int
    nodes: tuple[str, ...]
    node: int
    tasks: int
    restarts: int
    """How often the job has been requeued."""

    @property
    def life(self) -> str:
        """What all launchers of this life of the job agree upon, and no other: the rendezvous' id."""
        return f"slurm-{self.number}.{self.step}.{self.restarts}"

    def record(self, script: str) -> str:
        """The name of this node's record of `script`: the same in every life of the job, on whatever nodes; none for one task of many."""
        if self.tasks != len(self.nodes):
            return ""
        step = f"-step{self.step}" if self.step else ""
        name = re.sub(r"[^\w.-]", "_", os.path.basename(script).removesuffix(".py"))
        return f"slurm-{self.job}{step}-{name}" + (f".node{self.node}" if self.node else "")


def step_of(env: Mapping[str, str]) -> Step | None:
    """The step that `srun` started this process in; None outside of one, the batch script itself included."""
    try:
        number, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        nodes = expanded(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
        tasks = int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"])
        node, restarts = int(env["SLURM_NODEID"]), int(env.get("SLURM_RESTART_COUNT") or 0)
    except (KeyError, ValueError):
        return None
    if step < 0 or not 0 <= node < len(nodes):
        return None
    array = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job = "_".join(a for a in array if a) if all(array) else str(number)
    return Step(job=job, number=number, step=step, nodes=nodes, node=node, tasks=tasks, restarts=restarts)


def fill_in(args: argparse.Namespace, env: Mapping[str, str]) -> Step | None:
    """Give torch's `args` what follows from the step this process is in, if it is in one; returns the step."""
    step = step_of(env)
    if step is not None:
        vars(args).update(options_for(step, vars(args), address_of))
    return step


def options_for(step: Step, given: Mapping[str, object], address: Callable[[str], str]) -> dict[str, object]:
    """The options that follow from `step` where `given`, torch's options by name, does not say where nodes meet; else none.

    Args:
        step: the step this launcher is in.
        given: torch's own options as they were parsed, with its defaults where the user said nothing.
        address: how a node of Slurm's is reached from the others.
    """
    if any(given.get(name) != default for name, default in _RENDEZVOUS.items()):
        return {}
    nnodes = str(given["nnodes"])
    if nnodes == "1:1":
        nnodes = str(len(step.nodes))
    if nnodes in ("1", "1:1"):
        return {}
    if step.tasks != len(step.nodes):
        raise UsageError(
            f"srun has started {step.tasks} tasks on {len(step.nodes)} nodes, and goodrun is to be started once on each: "
            "say srun --ntasks-per-node=1 (or give --standalone for runs that have nothing to do with each other)"
        )
    port = _FIRST_PORT + (step.number + 1000 * step.step) % _PORTS
    return {
        "nnodes": nnodes,
        "rdzv_backend": "goodrun",
        "rdzv_endpoint": ",".join(_endpoints([address(node) for node in step.nodes[:_HOSTS]], port)),
        "rdzv_id": step.life,
        "local_addr": given.get("local_addr") or address(step.nodes[step.node]),
    }


def _endpoints(hosts: Sequence[str], port: int) -> Iterator[str]:
    """HOST:PORT for each; where several of Slurm's nodes are one machine, each has a port of its own."""
    for i, host in enumerate(hosts):
        yield f"{host}:{port + hosts[:i].count(host)}"


def expanded(text: str) -> tuple[str, ...]:
    """The names in a list of Slurm's: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login. ValueError if it is none."""
    return tuple(name for word in _words(text) for name in _names(word))


def _words(text: str) -> Iterator[str]:
    depth, word = 0, ""
    for letter in f"{text.strip()},":
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth and word:
            yield word
            word = ""
        elif depth in (0, 1) and (letter != "," or depth):
            word += letter
        else:
            raise ValueError(f"{text!r} is no list of nodes")
    if depth:
        raise ValueError(f"{text!r} is no list of nodes")


def _names(word: str) -> Iterator[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    inside, _, tail = rest.partition("]")
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{word!r} is no list of nodes")
        for number in range(int(first), int(last if dash else first) + 1):
            for end in _names(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def address_of(node: str) -> str:
    """Slurm's name of a node if it can be looked up, else the address by which Slurm itself reaches it."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        told = subprocess.run(["scontrol", "show", "node", "-o", node], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    found = re.search(r"\bNodeAddr=(\S+)", told)
    return found[1] if found else node
