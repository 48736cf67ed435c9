"""A snapshot whose parts lie in the memories of several nodes: they find it together, and bring each other what they lack.

The bytes go from rank to rank over the job's own connections, so nothing more has to listen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import CheckpointDamaged
from .fence import Token
from .fetch import Slots, bytes_of
from .index import Chunk, Index, read_index
from .manifest import shard_file
from .places import Where
from .ranks import Ranks
from .restoring import MEMORY, Offer, parts_of, said
from .wire import Gone, Line


@dataclass(frozen=True, order=True)
class Held:
    """What one node's keeper has whole of a snapshot: the parts of `ranks`, of a world of `world`, its own or copies of other nodes'."""

    step: int
    token: Token
    number: int
    world: int
    ranks: tuple[int, ...]
    durable: bool = False
    """Whether this keeper knows that it is on storage."""

    @property
    def snapshot(self) -> tuple[int, Token, int]:
        """Which it is, newest last; the same on all nodes."""
        return self.step, self.token, self.number


def choose(told: Sequence[Sequence[Held]]) -> tuple[tuple[int, Token, int], dict[int, int]] | None:
    """The newest snapshot of which all parts are somewhere, and for each part a rank of today that can reach it.

    Args:
        told: by rank of today, what its node's keeper holds.
    """
    every = {h.snapshot for held in told for h in held}
    for snapshot in sorted(every, reverse=True):
        found: dict[int, int] = {}
        world = 0
        for rank, held in enumerate(told):
            for h in held:
                if h.snapshot == snapshot:
                    world = h.world
                    found |= {part: rank for part in h.ranks if part not in found}
        if set(found) == set(range(world)):
            return snapshot, found
    return None


def among_nodes(line: Line | None, directory: Where, ranks: Ranks, trusted: Callable[[int, Token], bool], by: Token) -> Offer | None:
    """The newest snapshot that the nodes' keepers have whole between them; all ranks call this, and all have the same answer."""
    mine = [h for h in _held(line, directory, by) if trusted(h.step, h.token)] if line is not None else []
    told = ranks.gather(mine)
    chosen = choose(told)
    if chosen is None:
        return None
    snapshot, holders = chosen
    step, token, number = snapshot
    got: tuple[dict[str, Any], bytes, Slots] | None = None
    if line is not None and any(h.snapshot == snapshot for h in mine):
        stored = any(h.durable for held in told for h in held if h.snapshot == snapshot)
        writes = None if stored else sorted(part for part, rank in holders.items() if rank in ranks.local)
        question = {"op": "parts", "directory": str(directory), "token": list(token), "number": number, "by": by}
        got = parts_of(line, question | {"writes": writes})
    served = [part for part, rank in holders.items() if rank == ranks.rank]
    share: tuple[dict[str, Any] | None, bytes, dict[int, bytes]] | None = (None, b"", {})
    if served:
        share = None if got is None else (got[0] if 0 in served else None, got[1] if 0 in served else b"", _values(got[2], served))
    shares = ranks.gather(share)
    known = [s for s in shares if s is not None]
    if len(known) < len(shares):
        return None  # a keeper has gone, or has used the memory for something else, since it told
    head, index, _ = next(s for s in known if s[0] is not None)
    assert head is not None
    values = {part: value for _, _, v in known for part, value in v.items()}
    slots = got[2] if got is not None else Slots()
    return Offer(
        step=step,
        world_size=head["world"],
        started=token.started,
        generation=token.generation,
        path=directory / head["name"],
        entries=tuple(head["entries"]),
        index=lambda: read_index(index),
        values=lambda rank: values.get(rank, values[0]),
        source=lambda files: Across(slots, {shard_file(part): rank for part, rank in holders.items()}, ranks),
        tier=f"{MEMORY}, on several nodes",
    )


def _held(line: Line, directory: Where, by: Token) -> list[Held]:
    try:
        line.send({"op": "held", "directory": str(directory), "by": by})
        message, _, _ = said(line)
    except Gone:
        return []
    return [Held(s, Token(*t), n, w, tuple(r), d) for s, t, n, w, r, d in message.get("snapshots", [])]


def _values(slots: Slots, parts: Iterable[int]) -> dict[int, bytes]:
    return {part: slots.values[part] for part in parts if part in slots.values}


class Across:
    """The shards of a snapshot, some in the memory of this node, the rest brought by ranks of others."""

    def __init__(self, here: Slots, holders: dict[str, int], ranks: Ranks) -> None:
        """`holders`: for each shard the rank that serves it."""
        self._here, self._holders, self._ranks = here, holders, ranks
        self._brought: dict[tuple[str, int], torch.Tensor] = {}

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """All ranks tell what they lack, and each sends what it serves; takes as much memory as it lacks."""
        lacking = [(c.file, c.item, c.at, c.nbytes) for c in chunks if c.nbytes and not self._here.has(c.file)]
        me, group, under_way = self._ranks.rank, self._ranks.group, []
        for taker, wanted in enumerate(self._ranks.gather(lacking)):
            for file, item, at, nbytes in wanted:
                if taker == me:
                    into = self._brought[file, item] = torch.empty(nbytes, dtype=torch.uint8)
                    under_way.append(dist.irecv(into, self._holders[file], group=group))
                elif self._holders[file] == me:
                    part = torch.frombuffer(self._here.stretch(file, at, nbytes), dtype=torch.uint8)
                    under_way.append(dist.isend(part, taker, group=group))
        for one in under_way:
            if one is not None:
                one.wait()

    def take(self, chunk: Chunk, into: memoryview) -> None:
        """Copy; memory is trusted, and so are the job's own connections."""
        into[:] = self.view(chunk)

    def view(self, chunk: Chunk) -> memoryview:
        """The bytes in a slot here, or as they were brought."""
        if self._here.has(chunk.file):
            return self._here.view(chunk)
        if (brought := self._brought.get((chunk.file, chunk.item))) is None:
            raise CheckpointDamaged(f"{chunk.file} was not brought")
        return bytes_of(brought)

    def check_rest(self, index: Index, part: int, parts: int) -> None:
        """Memory is trusted."""
