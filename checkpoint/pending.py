"""The handle of one save, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import CheckpointError, CheckpointFenced
from .link import Said


class PendingSave:
    """One save: `done`, `skipped`, `seen` (somebody knows how it ended), and `result()`, which waits and raises what went wrong."""

    def __init__(self, step: int, number: int, listen: Callable[[float], None], *, skipped: bool = False) -> None:
        """`listen` takes in what the keeper says, waiting for up to so many seconds."""
        self.step, self.number, self.skipped = step, number, skipped
        self._listen = listen
        self._said: Said | None = Said() if skipped else None
        self.seen = skipped
        self.reported = False
        """Whether a failure was printed for people to read; it still has to be seen."""

    def ends(self, said: Said) -> None:
        """The keeper (or this rank) has said the last word on it."""
        self._said = said

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        if self._said is None:
            self._listen(0.0)
        return self._said is not None

    @property
    def settled(self) -> bool:
        """Whether it went well, or somebody knows that it did not."""
        return self.seen or (self._said is not None and not self._said.why)

    @property
    def path(self) -> str:
        """The checkpoint, once it is durable; else nothing."""
        return self._said.path if self._said is not None else ""

    @property
    def replaced(self) -> bool:
        """Whether a newer snapshot took its place, as the script asked for."""
        return self._said is not None and self._said.replaced

    @property
    def error(self) -> CheckpointError | None:
        """What went wrong, once it has."""
        if self._said is None or not self._said.why:
            return None
        return (CheckpointFenced if self._said.fenced else CheckpointError)(self._said.why)

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed; raise CheckpointError if it was not (once seen, it is the caller's)."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"the save of step {self.step} is still being written after {timeout} s")
            self._listen(1.0 if end is None else min(1.0, max(end - time.monotonic(), 0.0)))
        self.seen = True
        if (error := self.error) is not None:
            raise error
