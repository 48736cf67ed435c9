"""Signals to the launcher: handlers only enqueue, the loop acts; and a wait inside C++ can be broken off all the same."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_FORCE_AFTER_S = 1.5


class Interrupted(BaseException):
    """A stop signal came while the launcher was getting ready; `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """The launcher's signal handling. In another thread than the main one, where Python has none, it does nothing.

    Outside `waiting`, signals queue up and make descriptor `fileno()` readable. Inside, a stop signal raises what `raises` makes of it;
    should the main thread be stuck in C++ (a store that waits for its nodes cannot be interrupted), the process is ended from a thread.
    """

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.stops: tuple[int, ...] = ()
        self.raises: Callable[[int], BaseException] = Interrupted
        self.on_forced: Callable[[int], object] = lambda signum: None
        """Called before the process is ended by force."""
        self._ours, self._theirs = socket.socketpair()
        self._c_ours, self._c_theirs = socket.socketpair()
        for s in (self._ours, self._theirs, self._c_theirs):
            s.setblocking(False)
        self.broke_off: str | None = None
        """What was being waited for when a stop signal came, if anything."""
        self._what: str | None = None
        self._before: dict[int, object] = {}
        self._wakeup_before = -1
        self._thread: threading.Thread | None = None

    def install(self, stops: tuple[int, ...] = STOPPING) -> None:
        """Take over the stop signals and those passed on. One that was ignored at the start (nohup) stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for s in set(self.stops) - set(stops):  # no longer wanted
            signal.signal(s, self._before.pop(s))  # type: ignore[arg-type]
        self.stops = tuple(s for s in stops if signal.getsignal(s) is not signal.SIG_IGN)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the kernel would reap our ranks before we see how they ended
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for s in (*self.stops, *PASSED_ON):
            if s not in self._before and signal.getsignal(s) is not signal.SIG_IGN:
                self._before[s] = signal.signal(s, self._handle)
        if self._thread is None:
            self._wakeup_before = signal.set_wakeup_fd(self._c_theirs.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._break_off, name="goodrun-signals", daemon=True)
            self._thread.start()

    def restore(self) -> None:
        """Give the handlers back."""
        for s, handler in self._before.items():
            signal.signal(s, handler)  # type: ignore[arg-type]
        self._before.clear()
        if self._thread is not None:
            signal.set_wakeup_fd(self._wakeup_before if self._wakeup_before >= 0 else -1)
        self._c_theirs.close()
        self._ours.close()
        self._theirs.close()

    def fileno(self) -> int:
        """A descriptor that is readable while signals are queued."""
        return self._ours.fileno()

    def take(self) -> int | None:
        """The oldest queued signal, if there is one."""
        if not self.queue:
            return None
        with suppress(BlockingIOError):
            self._ours.recv(1)
        return self.queue.popleft()

    def wait_for(self, what: str | None) -> None:
        """From now on wait for `what`, to be broken off at once by a stop signal; None: back to queueing."""
        if what is not None and self.queue and self.queue[0] in self.stops:
            self.broke_off = what
            raise self.raises(self.queue.popleft())
        self._what = what

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A block that waits for `what`; afterwards signals queue, whatever was waited for before."""
        self.wait_for(what)
        try:
            yield
        finally:
            self.wait_for(None)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._what is not None and signum in self.stops:
            self.broke_off = self._what
            raise self.raises(signum)
        self.queue.append(signum)
        with suppress(OSError):  # the descriptor is readable already, or we are at the end
            self._theirs.send(b"s")

    def _break_off(self) -> None:
        """Runs in a thread: the C-level handler writes here even while the main thread never gets back to Python."""
        while raw := self._c_ours.recv(1):
            if raw[0] in self.stops and self._what is not None:
                time.sleep(_FORCE_AFTER_S)  # the main thread's own handler comes first, if it can
                if self._what is not None:
                    self.broke_off = self._what
                    self.on_forced(raw[0])
                    os._exit(128 + raw[0])
        self._c_ours.close()
