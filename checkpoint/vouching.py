"""Up to which step a run's numbers are known to be good: what each rank can say when it saves, and what that comes to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from .. import progress
from ..progress import Progress


class Word(NamedTuple):
    """What one rank says; None where its script tells no losses, or no digests of its replica."""

    good: int | None = None
    """The newest step whose state a finite loss has vouched for: that of a step after it."""
    replica: tuple[int, int] | None = None
    """The newest step that it has a digest of, and the digest."""


def own_word() -> Word:
    """That of this process's rank; it says nothing where no launcher has given it a page."""
    page = progress.page()
    return Word() if page is None else word_of(page.read())


def word_of(page: Progress) -> Word:
    """The word of the rank that has this page."""
    if page.finite_step < 0 and page.bad_step < 0:
        return Word(None, page.replica)
    finite = page.finite_step if page.bad_step < 0 else min(page.finite_step, page.bad_step)
    return Word(max(finite - 1, page.restored_step), page.replica)


def held_to(word: Word, well: int | None) -> Word:
    """The word of a rank whose node's devices were seen well, for certain, up to a step; None where nobody looks at them."""
    if well is None:
        return word
    return word._replace(good=well if word.good is None else min(word.good, well))


def read_word(said: list[Any]) -> Word:
    """A word as it comes out of JSON."""
    good, replica = said
    return Word(good, None if replica is None else (replica[0], replica[1]))


def vouched(words: Collection[Word]) -> int | None:
    """The newest step that all ranks together vouch for; None where they cannot: no numbers, or digests of different steps or models."""
    steps = [word.good for word in words if word.good is not None]
    replicas = {word.replica for word in words}
    if replicas - {None}:
        if len(replicas) > 1:
            return None
        steps += [told[0] for told in replicas if told is not None]
    return min(steps, default=None)
