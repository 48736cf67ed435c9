"""Reads what this agent's own record grows by, and keeps what comes of the others' records beside it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ..events import Failed, ReplicasTold, RunStarted, StackDumped
from ..journal import FILE_NAME, OTHERS_NAME, PROGRESS_LINE, parse_line, torn
from .tale import Line

_EVERY_S = 0.5
_PROGRESS_S = 5.0
_LONGEST = 1 << 14
_CLOSE_S = 5.0
_LEFT_OUT = b'{"event": "' + StackDumped.name.encode() + b'"'
_REPLICAS = f'{{"event": "{ReplicasTold.name}"'
_KEPT_BACK = {RunStarted.name: ("argv", "cwd"), Failed.name: ("message",)}
"""Words of the user's and of the script's: the network is not for them."""


class Scribe(threading.Thread):
    """A thread of its own: a disk that blocks must not keep the agent from giving signs of life."""

    def __init__(self, run_dir: Path, begin: int, agent: str, tell: Callable[[list[Line]], object]) -> None:
        """`begin` is where in the record this agent's part begins, in bytes; `tell` is given its lines."""
        super().__init__(name="goodrun-scribe", daemon=True)
        self.nodes = 1
        """How many nodes there are: the more, the less often each tells of mere progress."""
        self._agent = agent
        self._tell = tell
        self._own = open(run_dir / FILE_NAME, "rb")  # noqa: SIM115
        self._own.seek(begin)
        self._others_path = run_dir / OTHERS_NAME
        self._others: int | None = None
        self._heard: list[Line] = []
        self._replicas: deque[ReplicasTold] = deque()
        self._n = 0
        self._held: Line | None = None
        self._told_t = float("-inf")
        self._lock = threading.Lock()
        self._end = threading.Event()

    def run(self) -> None:
        """Until it is closed."""
        while not self._end.wait(_EVERY_S):
            with suppress(OSError):  # a disk that fails costs what it cannot keep, never the run
                self.look()
                self._keep()

    def close(self) -> None:
        """Keep what was heard last, as far as the disk lets us."""
        self._end.set()
        self.join(_CLOSE_S)
        if not self.is_alive():
            with suppress(OSError):
                self._keep()
            self._own.close()
            if self._others is not None:
                os.close(self._others)

    def heard(self, lines: Sequence[Line]) -> None:
        """Lines of other agents have come."""
        self._heard.extend(lines)
        told = [parse_line(line.text.encode()) for line in lines if line.text.startswith(_REPLICAS)]
        self._replicas.extend(e for e in told if isinstance(e, ReplicasTold))

    def replicas(self) -> list[ReplicasTold]:
        """What they have told of their ranks' models since the last call."""
        return [self._replicas.popleft() for _ in range(len(self._replicas))]

    def look(self) -> None:
        """Tell what the own record has grown by."""
        with self._lock:
            begin = self._own.tell()
            added = self._own.read()
            whole = added.rfind(b"\n") + 1
            self._own.seek(begin + whole)
            now, told = time.monotonic(), list[Line]()
            for raw in added[:whole].splitlines():
                if raw and len(raw) <= _LONGEST and not raw.startswith(_LEFT_OUT):
                    told += self._due(raw, now)
            self._tell(told)

    def _due(self, raw: bytes, now: float) -> list[Line]:
        """What is to be told now that this line has come: of successive progress the newest, before anything else and every few seconds."""
        line = Line(self._agent, self._n, _fit_to_tell(raw), raw.startswith(PROGRESS_LINE))
        self._n += 1
        if line.progress and now - self._told_t < max(_PROGRESS_S, self.nodes) - _EVERY_S:
            self._held = line
            return []
        before = [self._held] if self._held is not None and not line.progress else []
        self._held = None
        self._told_t = now if line.progress or before else self._told_t
        return [*before, line]

    def _keep(self) -> None:
        heard, self._heard = self._heard, []
        if not heard:
            return
        if self._others is None:
            self._others = os.open(self._others_path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(self._others, b"\n" * torn(self._others))
        text = "".join(f'{x.text[:-1]}, "agent": "{x.agent}", "n": {x.n}}}\n' for x in heard)
        os.write(self._others, text.encode())


def _fit_to_tell(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    for name, fields in _KEPT_BACK.items():
        if text.startswith(f'{{"event": "{name}"'):
            with suppress(ValueError):
                return json.dumps({k: v for k, v in json.loads(text).items() if k not in fields})
    return text
