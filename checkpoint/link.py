"""A rank's line to the keeper of its node: found or started, kept up, and what the keeper has said so far."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakMethod

from .errors import CheckpointError
from .places import Where
from .wire import ADDRESS_VARIABLE, Gone, Line, Message, address_of, connect

_PATIENCE_S = 15.0
"""How long a rank waits for a keeper to come up, or to come back."""
_ASK_AGAIN_S = 3.0


@dataclass
class Said:
    """What became of one save, in the keeper's words. `path` where it is durable, else `why` it is not."""

    path: str = ""
    why: str = ""
    fenced: bool = False
    replaced: bool = False
    kept: bool = False


@dataclass
class Link:
    """Messages to and from the keeper. Nothing here waits unless it says so."""

    directory: Where
    greet: WeakMethod[Callable[[], Message]]
    """Makes the `hello`."""
    again: WeakMethod[Callable[[Link], None]]
    """Tells a keeper that took another's place what that one knew."""
    rank: int = 0
    said: dict[int, Said] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    page: int = -1
    """A descriptor of the page that the ranks of this node share; whoever maps it closes it."""
    slots: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    _line: Line | None = None
    _known: bool = False
    _started: int = 0
    _asked: float = float("-inf")

    def __post_init__(self) -> None:
        """A child of this process must not keep the line open: the keeper takes its end for the rank's."""
        close = WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (hang_up := close()) and hang_up())

    @property
    def name(self) -> str:
        """The keeper's name: the launcher's, or one that all ranks of this node derive from the directory."""
        given = os.environ.get(ADDRESS_VARIABLE)
        return given or hashlib.sha256(os.fsencode(str(self.directory))).hexdigest()[:24]

    def find(self) -> Line | None:
        """A fresh line to the keeper if there is one; none is started."""
        return self._reach(_PATIENCE_S, lambda: None) if ADDRESS_VARIABLE in os.environ else connect(address_of(self.name))

    def up(self, patience_s: float = _PATIENCE_S) -> Line:
        """The line, made if need be; waits so long for a keeper to come up. Raises CheckpointError if none does."""
        end = time.monotonic() + patience_s
        while self._line is None:
            left = end - time.monotonic()
            line = self._reach(left, self._start if ADDRESS_VARIABLE not in os.environ else lambda: None)
            if line is None:
                raise CheckpointError(f"rank {self.rank}: no keeper came up within {patience_s:.0f} s to take the snapshots")
            self._line = line
            greet, again = self.greet(), self.again()
            assert greet is not None and again is not None  # this line is its owner's, who calls
            try:
                line.send(greet())
                if self._known:
                    again(self)
                self._known = True
            except Gone:  # one that is dying still has the name
                self._drop()
                if left <= 0:
                    raise CheckpointError(f"rank {self.rank}: the keeper went away at once") from None
        return self._line

    def _reach(self, patience_s: float, start: Callable[[], None]) -> Line | None:
        end = time.monotonic() + patience_s
        while (line := connect(address_of(self.name))) is None:
            if time.monotonic() - self._asked > _ASK_AGAIN_S:  # a keeper that was just leaving holds the name for a moment
                self._asked = time.monotonic()
                start()
            if time.monotonic() >= end:
                return None
            time.sleep(0.005)  # nothing announces that a process has begun to listen
        return line

    def _start(self) -> None:
        self._reap()
        command = keeper_command(self.name)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/")
        self._started, process.returncode = process.pid, 0  # it outlives this process, or is reaped here

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            if self._started:
                os.waitpid(self._started, os.WNOHANG)

    def send(self, message: Message, raw: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send, on a fresh line if the old one broke."""
        for _ in range(3):
            try:
                self.up().send(message, raw, fds)
                return
            except Gone:
                self._drop()
        raise CheckpointError(f"rank {self.rank}: the keeper goes away again and again")

    def tell(self, message: Message) -> None:
        """Send, from any thread; nothing is done where the line is broken."""
        if (line := self._line) is not None:
            with suppress(Gone):
                line.send(message)

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Take in one message if it comes within the time; whether one came. A keeper that is gone is found or started again."""
        if self._line is None and not self._known:
            return False
        try:
            whole = self.up(_PATIENCE_S if timeout_s else 0.0).receive(timeout_s)
        except Gone:
            self._drop()
            return False
        except CheckpointError:
            if timeout_s:
                raise
            return False  # a step does not wait for a keeper to come back; the next save does
        if whole is None:
            return False
        self._take(*whole)
        return True

    def _take(self, m: Message, raw: bytes, fds: list[int]) -> None:
        op = m["op"]
        if op == "welcome":
            if fds:
                self.page = fds[0]
        elif op == "durable":
            self.said[m["number"]] = Said(path=m["path"])
        elif op == "failed":
            self.said[m["number"]] = Said("", m["why"], m.get("fenced", False), m.get("replaced", False), m.get("kept", False))
        elif op == "trouble":
            self.troubles.append(m["why"])
        elif op == "slots":
            self.slots[m["layout"]] = (fds, m["why"])
        elif op == "decided":
            self.decided[m["number"]] = m["take"]

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        """Hang up: nothing more will be asked."""
        self._drop()
        self._reap()
        self._known = False


def keeper_command(name: str, *options: str, module: str = "goodrun.checkpoint.keeper") -> list[str]:
    """The words that start a keeper, `main` of `module`: no site packages, no environment of the job's, no torch."""
    code = f"import sys; sys.path.append(sys.argv.pop(1)); from {module} import main; main()"
    return [sys.executable, "-S", "-E", "-c", code, str(Path(__file__).parents[2]), name, *options]


def installed() -> list[str]:
    """Where this process finds installed packages: a keeper whose storage takes one of them looks there, too."""
    return [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]


def file_limit() -> int:
    """The largest file this process may write; -1 is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit
