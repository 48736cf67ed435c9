"""A save that runs in the background, and the promise that its failure is never lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from .errors import CheckpointError

# A rank whose peer hangs (not dies) inside a save would otherwise never exit; the launcher usually ends it long before.
_EXIT_LIMIT_S = 600.0


class PendingSave:
    """The handle of one save: `done`, `seen` (somebody knows how it ended), and `result()`, which waits and raises what went wrong."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        """Start `work` in a thread; a failure nobody looks at ends the process with status 1."""
        self.step = step
        self._work = work
        self._error: CheckpointError | None = None
        self.seen = False
        # A daemon: a collective that waits for a dead peer must not keep the interpreter alive.
        self._thread = threading.Thread(target=self._run, name=f"goodrun-save-{step}", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except CheckpointError as e:
            self._error = e
        except BaseException as e:  # the thread's border: kept for result(), where the loop sees it
            self._error = CheckpointError(f"the save of step {self.step} failed: {type(e).__name__}: {e}")
            self._error.__cause__ = e
        else:
            atexit.unregister(self._at_exit)

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed; raise CheckpointError if it was not (once seen, it is the caller's)."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the save of step {self.step} is still being written after {timeout} s")
        self.seen = True
        atexit.unregister(self._at_exit)
        if self._error is not None:
            raise self._error

    def _at_exit(self) -> None:
        if self.seen:
            return
        self._thread.join(_EXIT_LIMIT_S)
        if self._thread.is_alive():
            why = f"the save of step {self.step} was still not written {_EXIT_LIMIT_S:.0f} s after the script's end"
        elif self._error is not None:
            why = str(self._error)
        else:
            return
        print(f"goodrun: {why}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # An exit handler cannot change the exit status any other way, and a job whose last checkpoint is missing must not report success.
        os._exit(1)
