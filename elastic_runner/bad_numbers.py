"""Sees on the ranks' pages that numbers have gone bad: a loss that is not finite, models that differ where they must be equal; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..progress import Progress
from .policy import Kind


@dataclass(frozen=True, kw_only=True)
class Bad:
    """What was found, first at `rank` and after `step`."""

    kind: Kind
    rank: int
    step: int
    alone: bool
    """No other rank shows it: its device is suspected."""
    trusted_step: int
    """The newest step whose state is known to be good."""
    cause: str


class NumbersWatch:
    """One attempt's numbers."""

    def __init__(self) -> None:
        self._equal_step = -1

    def look(self, pages: Mapping[int, Progress]) -> Bad | None:
        """What is wrong now, if anything."""
        return _loss(pages) or self._replicas(pages)

    def _replicas(self, pages: Mapping[int, Progress]) -> Bad | None:
        """Digests are compared once all ranks have given that of one step; a rank that is behind is waited for."""
        told = {rank: replica for rank, p in pages.items() if (replica := p.replica) is not None}
        if len(told) < len(pages) or len(pages) < 2 or len({step for step, _ in told.values()}) > 1:
            return None
        step = next(step for step, _ in told.values())
        [(most, many), *others] = Counter(digest for _, digest in told.values()).most_common()
        if not others:
            self._equal_step = step
            return None
        odd = [rank for rank in sorted(told) if told[rank][1] != most]
        alone = len(odd) == 1 and many > 1
        return Bad(
            kind=Kind.REPLICAS,
            rank=odd[0],
            step=step,
            alone=alone,
            trusted_step=max(self._equal_step, 0, *(p.restored_step for p in pages.values())),
            cause=f"the model of rank {odd[0]} is not that of the others" if alone else "the models of the ranks are not equal",
        )


def _loss(pages: Mapping[int, Progress]) -> Bad | None:
    """A loss that is not finite. A state is known to be good once a step from it on had a finite one."""
    bad = [(p.bad_step, rank) for rank, p in pages.items() if p.bad_step >= 0]
    if not bad:
        return None
    step, first = min(bad)
    finite = min((p.finite_step for p in pages.values() if p.finite_step >= 0), default=-1)
    alone = len(pages) > 1 and all(p.finite_step >= step for rank, p in pages.items() if rank != first)
    return Bad(
        kind=Kind.NUMBERS,
        rank=first,
        step=step,
        alone=alone,
        trusted_step=max(min(finite, step) - 1, 0, *(p.restored_step for p in pages.values())),
        cause=f"the loss of rank {first}{', and of no other,' if alone else ''} is not finite",
    )
