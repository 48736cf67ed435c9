"""Keeps workers warm: processes that have torch imported and wait before the script, so that a restart costs one message.

Each is an ordinary child, `python -u train.py …` itself (see standby.py), and costs what torch's imports cost: about 220 MB, of which the
shared libraries' pages are shared. They are made one after the other beside the training, once it is under way.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import processes, standby

_IMPORT_TIME = re.compile(r"environ(?:\.setdefault\(|\.update\(|\[)[^\n]*?(OMP_|MKL_|OPENBLAS_|KMP_|NUMEXPR_|TORCH|PYTORCH_|CUDA_)\w*")


def why_cold(script: str, *, is_python: bool, env: Mapping[str, str]) -> str:
    """Why a warm start would not be faithful to a cold one, in words; empty if it would be."""
    if not is_python:
        return "it is not a Python script"
    if "PYTHON_EXEC" in env:
        return f"PYTHON_EXEC names another interpreter ({env['PYTHON_EXEC']})"
    path = Path(script)
    with suppress(OSError):
        found = _IMPORT_TIME.search(path.read_text(errors="replace")) if path.is_file() else None
        if found:
            return f"{script} sets variables that torch reads when it is imported ({found.group(0).split('[')[-1].strip()})"
        here = path.parent if path.is_file() else Path.cwd()
        beside = {p.stem for p in here.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
        # of the standard library only what importing torch has brought in here: a folder named test is nobody's shadow
        if shadows := beside & ({"torch", "numpy"} | (sys.stdlib_module_names & sys.modules.keys())) - {"__main__"}:
            return f"{sorted(shadows)[0]} beside {script} stands in front of a module that torch imports"
    return ""


@dataclass(kw_only=True)
class _Standby:
    command: tuple[str, ...]
    proc: subprocess.Popen[bytes]
    channel: socket.socket
    ready: bool = False


@dataclass(kw_only=True)
class Nursery:
    """The standbys of one node. `environment` makes a worker's start environment with goodrun's instruments in front."""

    environment: Callable[[], dict[str, str]]
    _waiting: list[_Standby] = field(default_factory=list)

    def tend(self, wanted: list[tuple[str, ...]]) -> None:
        """Bring the standbys nearer to one for each of the `wanted` commands: at most one is being made at a time."""
        self._waiting = [s for s in self._waiting if self._lives(s)]
        if any(not s.ready for s in self._waiting):
            return
        have = [s.command for s in self._waiting]
        for command in wanted:
            if command in have:
                have.remove(command)
            else:
                self._make(command)
                return

    def go(
        self, command: tuple[str, ...], env: Mapping[str, str], page: int, out: int | None, err: int | None
    ) -> subprocess.Popen[bytes] | None:
        """Let a standby for `command` go on as the rank that `env` describes; None if there is none that lives."""
        for s in sorted(self._waiting, key=lambda s: not s.ready):
            if s.command == command and s.proc.poll() is None:
                self._waiting.remove(s)
                with s.channel:
                    try:
                        standby.send_go(s.channel, env, page, out, err)
                    except OSError:  # it died this moment
                        self._end(s)
                        continue
                return s.proc
        return None

    def close(self) -> None:
        """End all standbys."""
        for s in self._waiting:
            s.channel.close()
            self._end(s)
        self._waiting.clear()

    def _make(self, command: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            env = {**self.environment(), standby.VARIABLE: str(theirs.fileno())}
            proc = subprocess.Popen(command, env=env, start_new_session=True, pass_fds=[theirs.fileno()])
        self._waiting.append(_Standby(command=command, proc=proc, channel=ours))

    def _lives(self, s: _Standby) -> bool:
        if s.proc.poll() is not None:
            s.channel.close()
            return False
        if not s.ready:
            with suppress(BlockingIOError):
                s.ready = s.channel.recv(1, socket.MSG_DONTWAIT) == standby.READY
        return True

    @staticmethod
    def _end(s: _Standby) -> None:
        processes.send_group(s.proc.pid, signal.SIGKILL)
        s.proc.wait()
