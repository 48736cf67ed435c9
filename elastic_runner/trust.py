"""Which checkpoints of this run are not to be restored from; and whether numbers that went bad came out good the second time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..checkpoint.distrust import DISTRUST_VARIABLE, Distrust, to_env
from ..progress import Progress
from .attempt import Broken
from .policy import Failure, Kind

_NOTE_EVERY_S = 0.1


@dataclass(kw_only=True)
class Trust:
    """Looks at the pages of the ranks as they train, and at what their attempts end with."""

    writer: Callable[[], tuple[int, int]]
    """The run's beginning and the attempt's generation: what the checkpoints of now are written under."""
    notice: Callable[[str], None]
    _distrusted: list[Distrust] = field(default_factory=list)
    _steps_at: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=1200))
    """Which step was done when, in the last minutes."""
    _replaying: Failure | None = None
    """The numbers that were bad, until their step has been done again."""

    def env(self) -> dict[str, str]:
        """What the ranks of the next attempt have to know."""
        return {DISTRUST_VARIABLE: to_env(self._distrusted)} if self._distrusted else {}

    def look(self, pages: Mapping[int, Progress]) -> None:
        """Note the step, and whether what was bad is good now: on other devices, that speaks against a device."""
        now = time.monotonic()
        if not self._steps_at or now - self._steps_at[-1][0] >= _NOTE_EVERY_S:
            self._steps_at.append((now, max((p.step for p in pages.values()), default=-1)))
        if self._replaying is None:
            return
        step, slot = self._replaying.step or 0, self._replaying.slot
        if self._replaying.kind is Kind.NUMBERS:
            well = "the loss of step {} is finite now"
            done = min((p.finite_step for p in pages.values() if p.finite_step >= 0), default=-1)
        else:
            well = "the models of the ranks are equal at step {} now"
            done = min((p.replica[0] if p.replica is not None else -1 for p in pages.values()), default=-1)
        if done < step:
            return
        self._replaying = None
        whose = f"slot {slot} is suspected, and has a strike" if slot >= 0 else "a device is suspected, and nothing says which"
        self.notice(f"{well.format(step)}, with the ranks on other devices: {whose}")

    def failed(self, broken: Broken, ranks: int) -> None:
        """An attempt of so many ranks has ended."""
        if broken.trusted_step is not None:
            self._beyond(broken.trusted_step, broken.cause)
        if broken.failure.kind in (Kind.NUMBERS, Kind.REPLICAS) and ranks > 1:
            self._replaying = broken.failure

    def tainted(self, since_t: float, why: str) -> None:
        """From monotonic second `since_t` on, a device's memory was not to be trusted."""
        before = next((step for at, step in reversed(self._steps_at) if at <= since_t), self._steps_at[0][1] if self._steps_at else 0)
        self._beyond(max(before, 0), why)

    def _beyond(self, step: int, why: str) -> None:
        """What this attempt, or one before it, has saved after `step` is not to be restored from."""
        self._distrusted.append(Distrust(step, *self.writer(), why))
