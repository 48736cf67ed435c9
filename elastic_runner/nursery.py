"""Keeps workers warm: a process that has torch imported, and forks of it that wait before the script, so that a start costs a message.

The template is `python -u train.py …` itself, held before the script (see standby.py); the standbys forked from it are children of the
supervisor like any worker. What torch's imports cost, about 200 MB and two seconds, is paid once for all ranks and all restarts.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import processes, standby

_SITE = Path(__file__).parent / "worker_site"
_ROOT = Path(__file__).parent.parent
_IMPORT_TIME = re.compile(r"environ(?:\.setdefault\(|\.update\(|\[)[^\n]*?(OMP_|MKL_|OPENBLAS_|KMP_|NUMEXPR_|TORCH|PYTORCH_|CUDA_)\w*")
_READ_AT_IMPORT = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "NUMEXPR_", "PYTORCH_", "PYTHON", "LD_")
_IMPORTS_WITHIN_S = 60.0
"""A template that needs longer is done without for that start."""
_FORKS_WITHIN_S = 10.0
_MOST_DEATHS = 3
"""Templates that died before they were ready; after so many nobody tries again."""


def instrumented(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with which a worker's interpreter first runs goodrun's sitecustomize; see there."""
    before = env.get("PYTHONPATH")
    more = {"PYTHONPATH": os.pathsep.join([str(_SITE), *([before] if before else [])])}
    if before is not None:
        more["GOODRUN_PYTHONPATH"] = "=" + before
    return {**env, **more, "GOODRUN_PARENT": str(os.getpid()), "GOODRUN_ROOT": str(_ROOT)}


def why_cold(script: str, *, is_python: bool, env: Mapping[str, str]) -> str:
    """Why a warm start would not be faithful to a cold one, in words; empty if it would be."""
    if not is_python:
        return "it is not a Python script"
    if "PYTHON_EXEC" in env:
        return f"PYTHON_EXEC names another interpreter ({env['PYTHON_EXEC']})"
    if env.get("PYTHONHASHSEED") == "random":
        return "PYTHONHASHSEED=random asks for a hash seed of its own for each rank"
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


def foreseen(argv: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """The command and the environment that the workers of this command line will probably have, told without torch's parser.

    A guess lets the template import torch while the launcher itself does. A wrong one is found out and costs nothing but processor time.
    """
    script = next((i for i, word in enumerate(argv) if word.endswith(".py") and os.path.isfile(word)), None)
    if script is None:
        return None
    options = " ".join(argv[:script]).replace("_", "-").replace("=", " ")
    if re.search(r"(^| )(-m|--module|--no-python|--run-path|--warm-start off|--preload|--config|--numa-binding)( |$)", options):
        return None
    if why_cold(argv[script], is_python=True, env=env):
        return None
    nproc = re.search(r"--nproc-per-node (\S+)", options)
    several = (nproc.group(1) if nproc else env.get("PET_NPROC_PER_NODE", "1")) != "1"
    threads = {"OMP_NUM_THREADS": "1"} if several and "OMP_NUM_THREADS" not in env else {}
    return (sys.executable, "-u", *argv[script:]), {**env, **threads}


@dataclass(kw_only=True)
class _Template:
    command: tuple[str, ...]
    preload: str
    guessed: dict[str, str] | None
    """What of the environment it read at import, until that was found to be right."""
    proc: subprocess.Popen[bytes]
    channel: socket.socket
    ready: bool = False


@dataclass(kw_only=True)
class _Standby:
    command: tuple[str, ...]
    preload: str
    channel: socket.socket
    asked_t: float
    pid: int = 0
    """0 until it is a child of ours that waits."""


@dataclass(kw_only=True)
class Nursery:
    """The template and the standbys of one node."""

    say: Callable[[str], None] = lambda text: None
    preload: str = ""
    """Modules to import besides torch's, separated by commas; one with a ? in front may fail."""
    learns_from: Path | None = None
    """A file that the ranks will write, with the modules to preload from then on."""
    _template: _Template | None = None
    _waiting: list[_Standby] = field(default_factory=list)
    _deaths: int = 0
    _given_up: bool = False

    @property
    def pid(self) -> int:
        """The process id of the template; 0 while there is none that is ready."""
        return self._template.proc.pid if self._template is not None and self._template.ready else 0

    def foresee(self, command: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Start a template for a command that is expected, in the environment that is expected."""
        self._make(command, env)

    def prepare(self, command: tuple[str, ...], count: int) -> None:
        """Have `count` standbys for `command`, or as many as can be had; waits for a template that is still importing."""
        self.tend(command, count)
        end = time.monotonic() + _IMPORTS_WITHIN_S
        while self._template is not None and not self._template.ready and time.monotonic() < end:
            select.select([self._template.channel], [], [], end - time.monotonic())
            self.tend(command, count)
        end = time.monotonic() + _FORKS_WITHIN_S
        while (coming := [s.channel for s in self._waiting if not s.pid]) and time.monotonic() < end:
            select.select(coming, [], [], end - time.monotonic())
            self._sort_out()

    def tend(self, command: tuple[str, ...], count: int) -> None:
        """Bring the nursery nearer to `count` standbys for `command`; never waits."""
        self._sort_out()
        self._learn()
        self._look_at_template(command)
        if self._template is None:
            if not self._given_up:
                self._make(command, os.environ)
        elif self._template.ready:
            for s in [s for s in self._waiting if s.preload != self._template.preload]:
                self._waiting.remove(s)
                self._end(s)
            if len(self._waiting) < count:
                self._fork(self._template, min(count - len(self._waiting), standby.MOST_AT_ONCE))

    def go(self, command: tuple[str, ...], env: Mapping[str, str], page: int, out: int | None, err: int | None) -> processes.Adopted | None:
        """Let a standby for `command` go on as the rank that `env` describes; None if there is none that lives."""
        self._sort_out()
        for s in [s for s in self._waiting if s.pid and s.command == command]:
            self._waiting.remove(s)
            with s.channel:
                try:
                    standby.send_go(s.channel, env, page, out, err)
                except OSError:  # it died this moment
                    self._end(s)
                    continue
            return processes.Adopted(s.pid)
        return None

    def close(self) -> None:
        """End the template and all standbys."""
        self._drop_template()
        end = time.monotonic() + 1.0
        while (coming := [s.channel for s in self._waiting if not s.pid]) and time.monotonic() < end:  # to reap them
            select.select(coming, [], [], end - time.monotonic())
            self._sort_out()
        for s in self._waiting:
            self._end(s)
        self._waiting.clear()
        processes.be_subreaper(False)

    def _learn(self) -> None:
        if self.learns_from is not None and self.learns_from.exists():
            names = self.learns_from.read_text().split()
            self.learns_from.unlink()
            self.learns_from, self.preload = None, ",".join("?" + n for n in names)

    # -- the template --------------------------------------------------------------------------------------------------

    def _make(self, command: tuple[str, ...], env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            more = {standby.VARIABLE: str(theirs.fileno()), **({standby.PRELOAD_VARIABLE: self.preload} if self.preload else {})}
            proc = subprocess.Popen(command, env={**instrumented(env), **more}, start_new_session=True, pass_fds=[theirs.fileno()])
        self._template = _Template(command=command, preload=self.preload, guessed=_read_at_import(env), proc=proc, channel=ours)

    def _look_at_template(self, command: tuple[str, ...]) -> None:
        t = self._template
        if t is None:
            return
        if (t.command, t.preload) != (command, self.preload) or (t.guessed is not None and t.guessed != _read_at_import(os.environ)):
            self._drop_template()
            return
        t.guessed = None
        if not t.ready:
            try:
                word = t.channel.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if wrong := json.loads(word or '""'):
                self._without(wrong)
            t.ready = bool(word) and not wrong
        if not t.ready or t.proc.poll() is not None:
            self._deaths += not t.ready
            if self._deaths >= _MOST_DEATHS and not self._given_up:
                self._without("the process that imports for all ranks died before it was ready")
            self._drop_template()

    def _without(self, wrong: str) -> None:
        """Do without what went `wrong`: what was to be preloaded first, then all warmth."""
        if self.preload.startswith("?"):
            self.say(f"--preload auto is given up: {wrong}")
            self.preload = ""
        else:
            self._given_up = True
            self.say(f"starts will be cold: {wrong}")

    def _drop_template(self) -> None:
        if self._template is not None:
            self._template.channel.close()
            processes.send_group(self._template.proc.pid, signal.SIGKILL)
            self._template.proc.wait()
            self._template = None

    # -- the standbys --------------------------------------------------------------------------------------------------

    def _fork(self, template: _Template, count: int) -> None:
        now, pairs = time.monotonic(), [socket.socketpair() for _ in range(count)]
        processes.be_subreaper(True)
        try:
            standby.ask_for(template.channel, [theirs for _, theirs in pairs])
            self._waiting += [_Standby(command=template.command, preload=template.preload, channel=ours, asked_t=now) for ours, _ in pairs]
        except OSError:
            for ours, _ in pairs:
                ours.close()
        for _, theirs in pairs:
            theirs.close()

    def _sort_out(self) -> None:
        """Learn which standbys have become ready, drop those that have died."""
        self._waiting = [s for s in self._waiting if self._lives(s)]
        if all(s.pid for s in self._waiting):
            processes.be_subreaper(False)  # whoever else is orphaned on this machine is none of ours

    def _lives(self, s: _Standby) -> bool:
        try:
            word = s.channel.recv(4, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if s.pid or time.monotonic() - s.asked_t < _FORKS_WITHIN_S:
                return True
            word = b""
        except OSError:
            word = b""
        if word:
            s.pid = int.from_bytes(word, "big")
            return True
        self._end(s)
        return False

    @staticmethod
    def _end(s: _Standby) -> None:
        s.channel.close()
        if s.pid:
            processes.send_group(s.pid, signal.SIGKILL)
            processes.Adopted(s.pid).wait()


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT)}
