"""Which checkpoints of this run are not to be restored from; and whether numbers that went bad came out good the second time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..checkpoint.distrust import DISTRUST_VARIABLE, Distrust, read, to_env
from ..progress import Progress
from .attempt import Broken
from .bad_numbers import NumbersWatch
from .events import ReplicasTold
from .policy import Failure, Kind
from .recorder import Recorder

_NOTE_EVERY_S = 0.1


@dataclass(kw_only=True)
class Trust:
    """Looks at the pages of the ranks as they train, and at what their attempts end with."""

    writer: Callable[[], tuple[int, int]]
    """The run's beginning and the attempt's generation: what the checkpoints of now are written under."""
    recorder: Recorder
    heard: Callable[[], Sequence[ReplicasTold]] | None = None
    """What other nodes have told of their ranks' models since the last call; None where nodes do not tell each other."""
    turns: bool = False
    """Whether the ranks of all nodes are to come to other devices in the next round."""
    well_t: Callable[[], float | None] = lambda: None
    """The last moment at which all devices were well for certain; None where they are not watched."""
    vouch: Callable[[int], None] = lambda step: None
    """Told up to which step they were: what was saved by then has to be kept, for nothing newer may turn out to be trusted."""
    _distrusted: list[Distrust] = field(default_factory=list)
    _steps_at: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=1200))
    """Which step was done when, in the last minutes."""
    _replaying: Failure | None = None
    """The numbers that were bad, until their step has been done again."""

    def env(self) -> dict[str, str]:
        """What the ranks of the next attempt have to know."""
        return {DISTRUST_VARIABLE: to_env(self._distrusted)} if self._distrusted else {}

    @property
    def told(self) -> tuple[str, ...]:
        """What the other nodes have to know, each on its own."""
        return tuple(to_env([distrust]) for distrust in self._distrusted)

    def agreed(self, told: Sequence[str]) -> None:
        """A round has formed, and this is what any node of it distrusts."""
        self.turns = False
        self._distrusted = [distrust for one in told for distrust in read(one)]

    def numbers(self, here: int, world_size: int) -> NumbersWatch:
        """What looks at the numbers of an attempt's ranks; those of other nodes count where nodes tell each other."""
        return NumbersWatch(world_size if self.heard is not None else here)

    def look(self, pages: Mapping[int, Progress], numbers: NumbersWatch) -> None:
        """Note the step, and whether what was bad is good now: on other devices, that speaks against a device."""
        now = time.monotonic()
        self._exchange(pages, numbers)
        if not self._steps_at or now - self._steps_at[-1][0] >= _NOTE_EVERY_S:
            self._steps_at.append((now, max((p.step for p in pages.values()), default=-1)))
            if (well_t := self.well_t()) is not None:
                self.vouch(max([self._step_at(well_t), *(p.restored_step for p in pages.values())]))
        if self._replaying is None:
            return
        step, slot = self._replaying.step or 0, self._replaying.slot
        if self._replaying.kind is Kind.NUMBERS:
            well = "the loss of step {} is finite now"
            done = min((p.finite_step for p in pages.values() if p.finite_step >= 0), default=-1)
        else:
            well = "the models of the ranks are equal at step {} now"
            done = numbers.equal_step
        if done < step:
            return
        self._replaying = None
        whose = f"slot {slot} is suspected, and has a strike" if slot >= 0 else "a device is suspected, and nothing says which"
        self.recorder.notice(f"{well.format(step)}, with the ranks on other devices: {whose}")

    def _exchange(self, pages: Mapping[int, Progress], numbers: NumbersWatch) -> None:
        """With the other nodes: what the ranks' models are."""
        for theirs in self.heard() if self.heard is not None else ():
            if theirs.attempt == self.writer()[1]:
                numbers.hear(theirs.step, dict(zip(theirs.ranks, theirs.digests, strict=True)))
        if (ours := numbers.news(pages)) is not None:
            self.recorder.replicas(*ours)

    def failed(self, broken: Broken, ranks: int) -> None:
        """An attempt of so many ranks has ended."""
        if broken.trusted_step is not None:
            self._beyond(broken.trusted_step, broken.cause)
        if broken.failure.kind in (Kind.NUMBERS, Kind.REPLICAS) and ranks > 1:
            self._replaying, self.turns = broken.failure, True

    def tainted(self, since_t: float, why: str) -> None:
        """From monotonic second `since_t` on, a device's memory was not to be trusted."""
        self._beyond(max(self._step_at(since_t), 0), why)

    def _step_at(self, t: float) -> int:
        """The newest step at monotonic second `t`, or the first that is remembered."""
        return next((step for at, step in reversed(self._steps_at) if at <= t), self._steps_at[0][1] if self._steps_at else 0)

    def _beyond(self, step: int, why: str) -> None:
        """What this attempt, or one before it, has saved after `step` is not to be restored from."""
        self._distrusted.append(Distrust(step, *self.writer(), why))
