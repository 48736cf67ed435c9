"""Sees on the ranks' pages that numbers have gone bad: a loss that is not finite, models that differ where they must be equal; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..progress import Progress
from .policy import Kind

_STEPS_KEPT = 64
"""A rank elsewhere may be so many saves behind."""


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
    """One attempt's numbers, as one node sees them."""

    def __init__(self, world_size: int) -> None:
        """So many ranks are compared, those of other nodes that tell us included."""
        self.equal_step = -1
        """The newest step at which all their models were equal."""
        self.world_size = world_size
        self._digests: dict[int, dict[int, int]] = {}
        """Of each step not compared yet the digests of the ranks that have told one."""
        self._told_step = -1

    def look(self, pages: Mapping[int, Progress]) -> Bad | None:
        """What is wrong now with a rank of this node, if anything."""
        for rank, p in pages.items():
            if p.replica is not None:
                self.hear(p.replica[0], {rank: p.replica[1]})
        return _loss(pages, here="" if len(pages) == self.world_size else " here") or self._replicas(pages)

    def hear(self, step: int, digests: Mapping[int, int]) -> None:
        """These ranks have told what their models are after a step."""
        if step > self.equal_step:
            self._digests.setdefault(step, {}).update(digests)
        if len(self._digests) > _STEPS_KEPT:
            del self._digests[min(self._digests)]

    def news(self, ranks: Collection[int]) -> tuple[int, dict[int, int]] | None:
        """The newest step of which all ranks here have told a digest, and those, for the other nodes: once, and None if there are none."""
        step = max((s for s, told in self._digests.items() if told.keys() >= set(ranks)), default=-1)
        if len(ranks) == self.world_size or step <= self._told_step:
            return None
        self._told_step = step
        return step, {rank: self._digests[step][rank] for rank in ranks}

    def _replicas(self, pages: Mapping[int, Progress]) -> Bad | None:
        """Digests are compared once all ranks have given that of one step. The node whose rank is odd is the one that acts."""
        unequal = None
        for step in sorted(s for s, told in self._digests.items() if len(told) == self.world_size > 1):
            if len(set(self._digests[step].values())) > 1:
                unequal = step
                break
            self.equal_step = step
        self._digests = {s: d for s, d in self._digests.items() if s > self.equal_step}
        if unequal is None:
            return None
        told = dict(sorted(self._digests[unequal].items()))
        [(most, many), *_] = Counter(told.values()).most_common()  # of two that are as many, that of the lower rank, on every node
        odd = [rank for rank, digest in told.items() if digest != most]
        if odd[0] not in pages:
            return None
        alone = len(odd) == 1 and many > 1
        return Bad(
            kind=Kind.REPLICAS,
            rank=odd[0],
            step=unequal,
            alone=alone,
            trusted_step=max(self.equal_step, 0, *(p.restored_step for p in pages.values())),
            cause=f"the model of rank {odd[0]} is not that of the others" if alone else "the models of the ranks are not equal",
        )


def _loss(pages: Mapping[int, Progress], here: str) -> Bad | None:
    """A loss that is not finite. A state is known to be good once a step from it on had a finite one. `here`: there are other nodes."""
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
        cause=f"the loss of rank {first}{f', and of no other{here},' if alone else ''} is not finite",
    )
