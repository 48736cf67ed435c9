"""The prober as the launcher has it: a process that is read without waiting, held to a deadline, and replaced when it dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .answers import Answer, Device, Held, Report, Told, answers_from_json

_FIRST_WORD_S = 30.0
"""How long a new prober may take to import its library and initialise it, at the least."""
_AGAIN_AFTER_S, _AGAIN_AFTER_AT_MOST_S = 1.0, 60.0
_FOLDER = str(Path(__file__).resolve().parents[3])
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from goodrun.elastic_runner.devices import {}; sys.exit({}.main(sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The devices that the driver counts, as the prober found them at its start."""

    driver: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class Xid:
    """A device reported an XID. `recovery`: field 230, asked for after it."""

    device: str
    code: int
    recovery: Answer


@dataclass(frozen=True, kw_only=True)
class InUse:
    """What is in use of the memory of the devices that were asked about; one that does not tell is missing."""

    held: Mapping[str, Held]


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The state of each network port of the node."""

    states: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """The prober itself is in trouble, in words: it died, hung, or cannot ask. `asks`: whether the next one will be started."""

    text: str
    asks: bool = True


Heard = Found | Report | Xid | InUse | Ports | Trouble


def command(module: str, *args: object) -> list[str]:
    """The words that run `main` of a module beside this one, wherever goodrun was imported from."""
    return [sys.executable, "-c", _CODE.format(module, module), _FOLDER, *map(str, args)]


class ProberProcess:
    """One prober at a time. `read` never waits."""

    def __init__(
        self,
        every_s: float,
        deadline_s: float,
        env: Mapping[str, str],
        uuids: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`uuids`: whom to ask about; nobody means everybody."""
        self.uuids = tuple(uuids)
        self._every_s, self._deadline_s, self._env, self._clock = every_s, deadline_s, env, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        self._rest = b""
        self._asked: tuple[str, str] | None = None
        self._heard_t = self._start_t = 0.0
        self._spoke = False
        self._failures = 0
        self._cannot = ""
        self._refused = False

    @property
    def pid(self) -> int:
        """The process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start a prober. It is not of our terminal's group, and dies with us."""
        self._rest, self._asked, self._spoke, self._refused = b"", None, False, False
        self._heard_t = self._clock()
        self._process = subprocess.Popen(
            command("prober", os.getpid(), self._every_s, 0, *self.uuids),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(self._env),
            start_new_session=True,
            cwd="/",
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def ask_about(self, uuids: Sequence[str]) -> None:
        """Go on with another set of devices, with a new prober: the one there is may hang on a device that is not in the set."""
        self.uuids = tuple(uuids)
        self._end()
        self.start()

    def ask_memory(self, uuids: Sequence[str]) -> bool:
        """Have what is in use on these devices told as soon as may be; False if nobody is there to be asked."""
        if self._process is None:
            return False
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), json.dumps(uuids).encode() + b"\n")
        except OSError:  # it has ended, which is told in `read`
            return False
        return True

    def read(self) -> list[Heard]:
        """What has been heard since the last call; and what has not been, for too long."""
        self._dying = [p for p in self._dying if p.poll() is None]
        if self._process is None:
            if self._start_t and self._clock() >= self._start_t:
                self.start()
            return []
        heard, ended = self._drain()
        if ended:
            return heard + self._died()
        if self._clock() - self._heard_t > (self._deadline_s if self._spoke else max(self._deadline_s, _FIRST_WORD_S)):
            return heard + self._hung()
        return heard

    def close(self) -> None:
        """End it; one that hangs in the driver is left to the kernel."""
        self._start_t = 0.0
        self._end()
        for process in self._dying:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self._dying = []

    def _drain(self) -> tuple[list[Heard], bool]:
        """What the pipe holds, and whether its other end is closed."""
        assert self._process is not None and self._process.stdout is not None
        heard: list[Heard] = []
        with suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 65536):
                self._heard_t = self._clock()
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                heard += filter(None, map(self._understand, lines))
            return heard, True
        return heard, False

    def _understand(self, line: bytes) -> Heard | None:
        try:
            word, *rest = json.loads(line)
            self._asked = (rest[0], rest[1]) if word == "ask" else None
            self._spoke = True
            if word == "cannot":
                before, self._cannot = self._cannot, rest[0]
                self._refused = True
                return None if before == rest[0] else Trouble(text=f"the GPUs are not watched: {rest[0]}", asks=False)
            if word == "report":
                self._failures, self._cannot = 0, ""
            return _message(word, rest)
        except (ValueError, TypeError, KeyError, IndexError):  # a driver that writes to our standard output
            return None

    def _died(self) -> list[Heard]:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        code, refused = self._process.returncode, self._refused
        again_s = self._replace(_AGAIN_AFTER_AT_MOST_S if refused else None)
        if refused:  # it has said why
            return []
        what = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return [Trouble(text=f"the prober {what}: started again in {again_s:.0f} s")]

    def _hung(self) -> list[Heard]:
        silent_s, asked = self._clock() - self._heard_t, self._asked
        again_s = self._replace()
        if asked is None:
            return [Trouble(text=f"the prober has been silent for {silent_s:.1f} s: started again in {again_s:.0f} s")]
        device, query = asked
        hung = Report(device=device, answers={query: Answer(told=Told.HUNG, text=f"no answer for {silent_s:.1f} s")})
        return [hung, Trouble(text=f"the driver does not answer {query} of {device} for {silent_s:.1f} s: the prober is replaced")]

    def _replace(self, after_s: float | None = None) -> float:
        """Get rid of the prober; a new one follows `after_s` later, by default the longer the more have failed. Returns the while."""
        self._end()
        if after_s is None:
            after_s = min(_AGAIN_AFTER_S * 2.0**self._failures, _AGAIN_AFTER_AT_MOST_S)
            self._failures = min(self._failures + 1, 10)
        self._start_t = self._clock() + after_s
        return after_s

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._dying.append(self._process)  # in the driver it may stay for long: it is not waited for
            self._process = None


def _message(word: str, rest: list[Any]) -> Heard | None:
    if word == "devices":
        devices = tuple(Device(uuid=u, name=n, index=i, instances=tuple(mig)) for u, n, i, mig in rest[1])
        return Found(driver=rest[0], devices=devices)
    if word == "report":
        return Report(device=rest[0], answers=answers_from_json(rest[1]))
    if word == "xid":
        return Xid(device=rest[0], code=int(rest[1]), recovery=answers_from_json(rest[2])["recovery_action"])
    if word == "ports":
        return Ports(states=rest[0])
    if word == "held":
        return InUse(held={uuid: Held(used=used, pids=tuple(pids)) for uuid, (used, pids) in rest[0].items()})
    return None
