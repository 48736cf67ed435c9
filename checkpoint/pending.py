"""The handle of one save, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .errors import CheckpointError, CheckpointFenced, SnapshotKept
from .link import Said


@dataclass(eq=False)
class Fate:
    """What is known of one save. `said` is the last word on it, the keeper's or this rank's own."""

    step: int
    number: int
    said: Said | None = None
    begun_t: float = 0.0
    ended_t: float = 0.0
    """Monotonic seconds."""
    seen: bool = False
    """Whether somebody knows how it ended."""
    reported: bool = False
    """Whether a failure was printed for people to read; it still has to be seen."""

    @property
    def error(self) -> CheckpointError | None:
        """What went wrong, once it has."""
        if self.said is None or not self.said.why:
            return None
        kind = CheckpointFenced if self.said.fenced else SnapshotKept if self.said.kept else CheckpointError
        return kind(self.said.why)

    @property
    def settled(self) -> bool:
        """Whether it went well, or somebody knows that it did not."""
        return self.seen or (self.said is not None and not self.said.why)


class PendingSave:
    """One save: `done`, `skipped`, `path`, and `result()`, which waits and raises what went wrong."""

    def __init__(self, fate: Fate, listen: Callable[[float], None], *, skipped: bool = False) -> None:
        """`listen` takes in what the keeper says, waiting for up to so many seconds."""
        self.fate, self.skipped = fate, skipped
        self.stall_s = 0.0
        """How long the training loop was held up."""
        self._listen = listen

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.fate.step

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        if self.fate.said is None:
            self._listen(0.0)
        return self.fate.said is not None

    @property
    def durable_s(self) -> float:
        """Seconds from the call until the checkpoint was known to be durable; 0 before."""
        return max(self.fate.ended_t - self.fate.begun_t, 0.0)

    @property
    def path(self) -> str:
        """The checkpoint, once it is durable; else nothing."""
        return self.fate.said.path if self.fate.said is not None else ""

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is committed; raise CheckpointError if it was not (once seen, it is the caller's)."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"the save of step {self.step} is still being written after {timeout} s")
            self._listen(1.0 if end is None else min(1.0, max(end - time.monotonic(), 0.0)))
        self.fate.seen = True
        if (error := self.fate.error) is not None:
            raise error
