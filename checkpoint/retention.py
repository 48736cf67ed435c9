"""Which checkpoints stay: a pure rule over steps and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The newest `last` stay; beside them every one whose step `every_steps` divides, and the first of each `every_hours` hours.

    Only what may be restored from counts.
    """

    last: int = 3
    every_steps: int | None = None
    every_hours: float | None = None

    def __post_init__(self) -> None:
        """Refuse what would keep nothing or divide by nothing."""
        if self.last < 1:
            raise ValueError(f"keep={self.last}: at least one checkpoint has to be kept")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps}: one checkpoint in every 1, 2, 3 … steps can be kept for good")
        if self.every_hours is not None and self.every_hours <= 0:
            raise ValueError(f"every_hours={self.every_hours}: give a number of hours above 0")


@dataclass(frozen=True)
class Dated:
    """A checkpoint as the rule sees it: its name, its step, and when it was committed (seconds of wall time)."""

    name: str
    step: int
    at: float
    good: bool = True
    """Whether it may be restored from; one that is damaged or not trusted takes no good one's place."""


def superfluous(whole: Sequence[Dated], keep: Keep, vouched: int | None = None) -> list[str]:
    """The names of those that may go; `whole` is newest first. One that is no good goes once enough good ones are newer.

    `vouched`: the numbers are known to be good up to this step; None where nothing is said of them. The newest checkpoint that is none
    later stays, whatever the rule says: it is what a run goes back to whose numbers turn out to have gone bad since. So does the oldest
    that is later: it takes that one's place once it is vouched for, however many newer ones have come by then.
    """
    good = [d for d in whole if d.good]
    newest = whole[: whole.index(good[keep.last - 1]) + 1] if len(good) >= keep.last else whole
    stays = {d.name for d in newest}
    if vouched is not None:
        stays |= {d.name for d in [d for d in good if d.step <= vouched][:1] + [d for d in good if d.step > vouched][-1:]}
    if keep.every_steps:
        stays |= {d.name for d in good if d.step % keep.every_steps == 0}
    if keep.every_hours:
        since: float | None = None
        for dated in sorted(good, key=lambda d: d.at):
            if since is None or dated.at - since >= keep.every_hours * 3600:
                stays.add(dated.name)
                since = dated.at
    return [d.name for d in whole if d.name not in stays]
