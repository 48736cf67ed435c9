"""One node's ranks, as its events tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .. import events as ev
from ..events import Event

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank as its page last told. `data_share` is of the time since the attempt's first step; -1 where unknown."""

    rank: int
    slot: int
    step: int
    step_s: float
    data_share: float
    data_wait_s: float
    silent_s: float
    phase: str
    health: str
    node: str = ""


@dataclass(kw_only=True)
class NodeRanks:
    """Those of one node; `add` is the only way in."""

    node: str
    attempt: int = -1
    slots: tuple[int, ...] = ()
    first_rank: int = 0
    progress: ev.RankProgress | None = None
    """The newest of this attempt."""
    _stepping_t: float = 0.0
    _hung: set[int] = field(default_factory=set)
    _exited: set[int] = field(default_factory=set)

    def add(self, e: Event) -> None:
        """Take one of the node's events."""
        match e:
            case ev.AttemptStarted():
                self.attempt, self.slots, self.first_rank = e.attempt, e.slots, e.first_rank
                self.progress, self._hung, self._exited, self._stepping_t = None, set(), set(), 0.0
            case ev.RankProgress():
                self.progress = e
            case ev.FirstStep():
                self._stepping_t = e.first_step_t or e.t
            case ev.RankHung():
                self._hung.add(e.rank)
            case ev.RankExited():
                self._exited.add(e.rank)
            case _:
                pass

    def rows(self) -> Iterator[RankRow]:
        """Rank by rank."""
        p = self.progress or ev.RankProgress()
        since = p.t - self._stepping_t if self._stepping_t else 0.0
        for local, slot in enumerate(self.slots):
            rank = self.first_rank + local
            silent, longest = _of(p.silent_s, local, 0.0), p.longest_step_s
            health = "gone" if rank in self._exited else "hung" if rank in self._hung else ""
            if not health:
                health = "starting" if not self._stepping_t else "slow" if longest and silent > 3 * longest + 1 else "ok"
            yield RankRow(
                rank=rank,
                slot=slot,
                step=_of(p.steps, local, -1),
                step_s=_of(p.last_step_s, local, 0.0),
                data_wait_s=_of(p.data_wait_s, local, 0.0),
                data_share=min(_of(p.data_wait_s, local, 0.0) / since, 1.0) if since > 0 else -1.0,
                silent_s=silent,
                phase=_of(p.phases, local, ""),
                health=health,
                node=self.node,
            )


def _of(values: Sequence[T], i: int, otherwise: T) -> T:
    return values[i] if i < len(values) else otherwise
