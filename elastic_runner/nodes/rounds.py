"""What nodes agree on, a round, and the arithmetic of who may speak for the job when some do not answer.

A round is begun only when every one of its nodes has acknowledged it, and a majority of the round before is among them. So two halves of a
job that do not hear each other can never both go on, whichever way they were parted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One generation: the ids of its nodes in the order of their ranks, and who led when it was agreed on.

    An id names one agent process and is never used again.
    """

    generation: int
    nodes: tuple[str, ...]
    leader: str


@dataclass(frozen=True)
class Place:
    """What one node's place in a round comes to. `address` and `port` are where its first node serves the ranks' store."""

    rank: int
    nodes: int
    base_rank: int
    world_size: int
    base_role_rank: int
    role_world_size: int
    address: str
    port: int


@dataclass(frozen=True)
class Known:
    """What one node knows of the job's rounds: the last that was agreed on, and those it has acknowledged since."""

    committed: Round | None = None
    pending: tuple[Round, ...] = ()

    @property
    def generation(self) -> int:
        """The highest generation it has heard of; -1 if none."""
        return max((r.generation for r in (*([self.committed] if self.committed else []), *self.pending)), default=-1)


def quorum(present: Collection[str], base: Round, gone: Collection[str]) -> bool:
    """Whether `present` may decide what follows `base`, given that the nodes of `gone` are known to have ended.

    More than half of those left may; exactly half, if its leader is among them (or, where the leader is gone, the first of those left).
    """
    left = [n for n in base.nodes if n not in gone]
    here = sum(n in present for n in left)
    if 2 * here != len(left) or not left:
        return 2 * here >= len(left)
    return (base.leader if base.leader in left else left[0]) in present


def bases(known: Iterable[Known]) -> tuple[Round, ...]:
    """The rounds that must agree to the next one: the newest agreed on, and all after it that may have been, for all that is known."""
    told = list(known)
    newest = max((k.committed for k in told if k.committed), key=lambda r: r.generation, default=None)
    after = {r for k in told for r in k.pending if newest is None or r.generation > newest.generation}
    return (*([newest] if newest else []), *sorted(after, key=lambda r: r.generation))


def may_lead(known: dict[str, Known], nodes: Collection[str], gone: Collection[str], held: Collection[int], endpoints: int) -> bool:
    """Whether `nodes` may go on with the job, or begin it.

    Args:
        known: what they and their leader know of the job's rounds.
        nodes: those that follow one leader.
        gone: nodes that are known to have ended.
        held: which of the job's endpoints these nodes hold, by index.
        endpoints: how many endpoints the job has. A job is begun by most of their holders, or by half with the first.
    """
    if rounds := bases(known.values()):
        return all(quorum(nodes, r, gone) for r in rounds)
    return 2 * len(set(held)) > endpoints or (2 * len(set(held)) == endpoints and 0 in held)
