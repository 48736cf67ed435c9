"""How long many agents take to form a group, and to form it anew when some are lost: goodrun's rendezvous beside torch's c10d, in one run.

The agents are simulated: real sockets on loopback and the real code of both, without ranks, shared out over a few processes. All begin
together. A loss is the end of an agent's connections, as when its process dies, or (silent) nothing at all, as when its machine is cut off.
c10d's agents notice no loss by themselves; here they are told at once, as if their ranks had failed, and its timers are set as low as
whole seconds go (last call 1 s, keep-alive 1 s, three times); its defaults would add 30 and 12 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

PROCESSES = 4


class Agents(Protocol):
    """One process's share of the agents."""

    def form(self) -> None:
        """Have all of them wait for the round, and return when each has it."""

    def lose(self, mine: set[int], silent: bool) -> None:
        """Lose those in `mine`; return when all others have a new round."""

    def close(self) -> None:
        """End them all."""


class Ours:
    """Agents of goodrun's."""

    def __init__(self, numbers: list[int], count: int, ports: list[int]) -> None:
        from goodrun.checkpoint.sealed import job_key
        from goodrun.elastic_runner.nodes.messages import Ready
        from goodrun.elastic_runner.nodes.node import Changed, Formed, Job, Loop, Node

        self._formed, self._changed = Formed, Changed
        self._ready = Ready(0, 1, "127.0.0.1", 1, 1, "", 0)
        job = Job(key=job_key("", "bench"), endpoints=tuple(("127.0.0.1", p) for p in ports), nnodes=(1, count))
        self._loop = Loop()
        self._nodes = {n: Node(self._loop, job, f"n{n:04d}", f"n{n:04d}") for n in numbers}
        self._done = threading.Semaphore(0)
        for node in self._nodes.values():
            node.on_note = self._noter(node)
        self._loop.start()

    def _noter(self, node: Any) -> Any:
        def note(what: Any) -> None:
            if isinstance(what, self._formed):
                self._done.release()
            elif isinstance(what, self._changed):  # no ranks to stop
                node.member.ready(self._ready)

        return note

    def form(self) -> None:
        for node in self._nodes.values():
            self._loop.call(node.start)
            self._loop.call(lambda node=node: node.member.ready(self._ready))
        self._await()

    def lose(self, mine: set[int], silent: bool) -> None:
        for n in mine:
            node = self._nodes.pop(n)
            self._loop.call(lambda node=node: self._drop(node, silent))
        self._await()

    def _drop(self, node: Any, silent: bool) -> None:
        self._loop.nodes.remove(node)
        if not silent:
            node.close()
            return
        for link in node.wires.links.values():
            self._loop.selector.unregister(link.connection.sock)

    def _await(self) -> None:
        for _ in self._nodes:
            if not self._done.acquire(timeout=120):
                raise TimeoutError(f"not formed; {next(iter(self._nodes.values())).trouble}")

    def close(self) -> None:
        self._loop.stop()


class C10d:
    """Agents of torch's."""

    def __init__(self, numbers: list[int], count: int, ports: list[int]) -> None:
        self._numbers, self._count, self._port = numbers, count, ports[0]
        self._handlers: dict[int, Any] = {}
        self._failed: list[BaseException] = []

    def _make(self, n: int) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        conf = {"is_host": str(int(n == 0)), "last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}
        where = f"127.0.0.1:{self._port}"
        parameters = RendezvousParameters("c10d", where, "bench", 1, self._count, local_addr="127.0.0.1", **conf)
        backend, store = create_backend(parameters)
        return create_handler(store, backend, parameters)

    def _all(self, numbers: list[int]) -> None:
        def one(n: int) -> None:
            try:
                if n not in self._handlers:
                    self._handlers[n] = self._make(n)
                self._handlers[n].next_rendezvous()
            except BaseException as e:  # told by the caller
                self._failed.append(e)

        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in numbers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self._failed:
            raise self._failed[0]

    def form(self) -> None:
        self._all(self._numbers)

    def lose(self, mine: set[int], silent: bool) -> None:
        for n in mine:
            self._handlers.pop(n)._stop_heartbeats()
        self._numbers = [n for n in self._numbers if n not in mine]
        self._all(self._numbers)

    def close(self) -> None:
        for handler in self._handlers.values():
            handler._stop_heartbeats()


def share(pipe: Connection, kind: str, numbers: list[int], count: int, ports: list[int]) -> None:
    """A process with its share: obeys the commands that come over the pipe."""
    try:
        agents: Agents = (Ours if kind == "goodrun" else C10d)(numbers, count, ports)
        pipe.send(None)
        while (command := pipe.recv()) is not None:
            agents.form() if command == "form" else agents.lose(command[0] & set(numbers), command[1])
            pipe.send(time.monotonic())
    except Exception as e:  # the process's boundary: the other side prints it
        pipe.send(e)
    os._exit(0)


def measure(kind: str, count: int) -> dict[str, float]:
    """Seconds for each thing, of `count` agents."""
    ports = []
    for _ in range(3):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    start = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for p in range(min(PROCESSES, count)):
        ours, theirs = start.Pipe()
        processes.append(start.Process(target=share, args=(theirs, kind, list(range(p, count, PROCESSES)), count, ports)))
        processes[-1].start()
        pipes.append(ours)

    def heard() -> list[Any]:
        answers = []
        for pipe in pipes:
            answers.append(pipe.recv() if pipe.poll(600) else TimeoutError("no answer in 600 s"))
            if isinstance(answers[-1], Exception):
                raise answers[-1]
        return answers

    def told(command: Any) -> float:
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send(command)
        return round(max(heard()) - begin, 3)

    try:
        heard()
        found = {"form": told("form")}
        time.sleep(1)
        gone = count
        for name, lost, silent in (("one lost", 1, False), ("ten lost", 10, False), ("one silent", 1, True)):
            if gone - lost < 4 or (silent and kind == "c10d"):
                continue
            gone -= lost
            found[name] = told((set(range(gone, gone + lost)), silent))
            time.sleep(1)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--peers", nargs="+", default=["goodrun", "c10d"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    results = []
    for count in options.agents:
        for kind in options.peers:
            try:
                found: dict[str, Any] = measure(kind, count)
            except Exception as e:  # one that cannot do it must not keep the others from being measured
                found = {"failed": f"{type(e).__name__}: {e}"}
            results.append({"agents": count, "rendezvous": kind, **found})
            told = f"{count:4d} agents  {kind:8s}  " + "  ".join(f"{k} {v}" for k, v in found.items())
            print(json.dumps(results[-1]) if options.json else told, flush=True)


if __name__ == "__main__":
    main()
