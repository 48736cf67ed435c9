"""Runs a command of the user's for each event, beside the run: time-limited, one at a time, and never able to hold the run up."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..events import Event, RankProgress

_BACKLOG = 256


class Alerts:
    """A thread that runs `command` with the event as JSON on its stdin. Progress, which comes every few seconds, is left out."""

    def __init__(self, command: str, say: Callable[[str], None], *, limit_s: float = 10.0) -> None:
        """`limit_s`: how long the command may take for one event."""
        self._command, self._say, self._limit_s = command, say, limit_s
        self._waiting: queue.Queue[Event | None] = queue.Queue(_BACKLOG)
        self._complained = False
        self._end_t = float("inf")
        self._thread = threading.Thread(target=self._work, name="goodrun-on-event", daemon=True)
        self._thread.start()

    def add(self, e: Event) -> None:
        """Hand an event over; while the command is far behind, events are dropped rather than waited for."""
        if isinstance(e, RankProgress):
            return
        try:
            self._waiting.put_nowait(e)
        except queue.Full:
            self._complain("is too slow: events are dropped")

    def close(self) -> None:
        """Let the command have what is waiting, for `limit_s` at most."""
        self._end_t = time.monotonic() + self._limit_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=self._limit_s)
        self._thread.join(self._limit_s + 1)

    def _work(self) -> None:
        while (e := self._waiting.get()) is not None and time.monotonic() < self._end_t:
            body = json.dumps({"event": e.name, **dataclasses.asdict(e)}).encode() + b"\n"
            try:
                self._run(body)
            except OSError as error:  # no shell, no memory, no processes left: the run has other worries
                self._complain(f"could not be run: {error.strerror}")

    def _run(self, body: bytes) -> None:
        proc = subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C for the run is not for it
        )
        try:
            proc.communicate(body, timeout=min(self._limit_s, max(self._end_t - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            self._complain(f"took longer than {self._limit_s:g} s and was killed")
        finally:
            with suppress(OSError):
                os.killpg(proc.pid, signal.SIGKILL)
            proc.wait()
        if proc.returncode > 0:
            self._complain(f"ended with status {proc.returncode}")

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"--on-event {self._command!r} {what} (said once)")
