"""Copies of a snapshot's parts in other nodes' memory: how they are described, and how they lie on the shelf of a node that keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .drain import Item
from .fence import Token
from .memory import PAGE, Memory, SlotShape
from .retention import Keep
from .shelf import Job, Layout, Shelf, Snapshot, State
from .vouching import Word, read_word

Blobs = tuple[tuple[str, ...], bytes, bytes]


@dataclass(frozen=True)
class CopiedPart:
    """What one rank gave."""

    rank: int
    shape: SlotShape
    values: int
    """Bytes of values."""
    items: tuple[Item, ...]
    word: Word

    @property
    def nbytes(self) -> int:
        """How much there is to send."""
        return self.shape.shard + self.values

    def views(self, memory: Memory) -> list[memoryview]:
        """Where it lies in a slot."""
        view, at = memoryview(memory.map), self.shape.values_at
        return [view[PAGE : PAGE + self.shape.shard], view[at : at + self.values]]


@dataclass(frozen=True)
class Parcel:
    """All that a node needs to know of another's parts of a snapshot, to give them to ranks and to write them in its place."""

    directory: str
    token: Token
    number: int
    step: int
    layout: str
    world: int
    keep: Keep
    torch: str
    fsize: int
    parts: tuple[CopiedPart, ...]
    blobs: Blobs | None
    """What rank 0 gave for all, where its part is among these."""

    @property
    def job(self) -> Job:
        """The attempt, for a keeper to which none of its ranks has spoken yet."""
        return Job(self.token, self.world, (), self.keep, self.torch, self.fsize)

    def to_bytes(self) -> bytes:
        """As it is sent."""
        entries, index, metadata = self.blobs or ((), b"", b"")
        head = asdict(self) | {"blobs": None if self.blobs is None else [entries, len(index), len(metadata)]}
        return json.dumps(head).encode() + b"\n" + index + metadata

    @classmethod
    def from_bytes(cls, raw: bytes) -> Parcel:
        """What `to_bytes` made of it; raises ValueError, KeyError or TypeError for anything else."""
        line, _, rest = raw.partition(b"\n")
        m: dict[str, Any] = json.loads(line)
        blobs: Blobs | None = None
        if m["blobs"] is not None:
            entries, split, _ = m["blobs"]
            blobs = tuple(entries), rest[:split], rest[split:]
        parts = tuple(map(_part, m["parts"]))
        return cls(**m | {"token": Token(*m["token"]), "keep": Keep(**m["keep"]), "parts": parts, "blobs": blobs})


def _part(told: dict[str, Any]) -> CopiedPart:
    return CopiedPart(int(told["rank"]), SlotShape(**told["shape"]), int(told["values"]), _items(told["items"]), read_word(told["word"]))


def _items(told: list[Any]) -> tuple[Item, ...]:
    return tuple((int(at), int(n), tuple(map(int, seals))) for at, n, seals in told)


def next_to_send(shelf: Shelf) -> Snapshot | None:
    """The newest snapshot of which this node has parts of its own, unless the next nodes have it; what is older is of no interest."""
    ours = (s for s in shelf.intact() if shelf.writes(s) and (s.token == shelf.token or s.adopted == shelf.token))
    newest = next(ours, None)
    return newest if newest is not None and not newest.sent else None


def parcel_of(shelf: Shelf, snapshot: Snapshot) -> tuple[Parcel, dict[int, Memory]]:
    """What is sent of it, and where that lies."""
    job, parts, memories = shelf.jobs[snapshot.token], [], {}
    for rank in sorted(shelf.writes(snapshot)):
        slot, values = snapshot.given[rank]
        layout = job.layouts[snapshot.layout, rank]
        parts.append(CopiedPart(rank, layout.shape, values, layout.items, snapshot.words[rank]))
        memories[rank] = layout.slots[slot]
    parcel = Parcel(
        directory=shelf.directory,
        token=snapshot.token,
        number=snapshot.number,
        step=snapshot.step,
        layout=snapshot.layout,
        world=job.world_size,
        keep=job.keep,
        torch=job.torch,
        fsize=job.fsize,
        parts=tuple(parts),
        blobs=job.blobs.get(snapshot.layout) if 0 in memories else None,
    )
    return parcel, memories


def room_for(shelf: Shelf, parcel: Parcel) -> dict[int, Memory | None] | None:
    """Which parts this node lacks, and for each the memory of an older copy; None where some is to be made.

    Of a rank's parts two copies are kept, the newest and the one that is coming. None for a parcel of an attempt that was replaced, unless
    the newer one went on from it.
    """
    known = next((s for s in shelf.snapshots if (s.token, s.number) == (parcel.token, parcel.number)), None)
    if parcel.token < shelf.token and (known is None or known.adopted is None):
        return None
    job = shelf.jobs.setdefault(parcel.token, parcel.job)
    lacking = [p for p in parcel.parts if p.rank not in job.local and (known is None or p.rank not in known.given)]
    return {p.rank: _idle(shelf, job, parcel, p) for p in lacking}


def _idle(shelf: Shelf, job: Job, parcel: Parcel, part: CopiedPart) -> Memory | None:
    layout = job.layouts.get((parcel.layout, part.rank))
    if layout is None or layout.shape != part.shape:
        return None
    here = [s for s in shelf.snapshots if (s.token, s.layout) == (parcel.token, parcel.layout) and part.rank in s.given]
    for old in sorted(here, key=lambda s: s.number)[:-1]:
        if part.rank not in shelf.writes(old):
            del old.given[part.rank]
            if not old.given:
                shelf.snapshots.remove(old)
    used = {s.given[part.rank][0] for s in here if part.rank in s.given}
    idle = sorted(set(layout.slots) - used)
    return layout.slots.pop(idle[0]) if idle else None


def arrived(shelf: Shelf, parcel: Parcel, memories: dict[int, Memory]) -> None:
    """Parts of another node's ranks lie whole in these memories."""
    job = shelf.jobs.setdefault(parcel.token, parcel.job)
    found = next((s for s in shelf.snapshots if (s.token, s.number) == (parcel.token, parcel.number)), None)
    if found is None:
        found = Snapshot(parcel.number, parcel.step, parcel.token, parcel.layout, state=State.HELD)
        shelf.snapshots.append(found)
    for part in parcel.parts:
        memory = memories.get(part.rank)
        if memory is None:
            continue
        if part.rank in found.given:  # it was sent twice at a time
            memory.close()
            continue
        memory.holds = parcel.number
        layout = job.layouts.setdefault((parcel.layout, part.rank), Layout(part.shape, part.items))
        layout.slots[parcel.number] = memory
        found.given[part.rank] = (parcel.number, part.values)
        found.words[part.rank] = part.word
    if parcel.blobs is not None:
        needed = {s.layout for s in shelf.snapshots if s.token == parcel.token}
        job.blobs = {name: blobs for name, blobs in job.blobs.items() if name in needed} | {parcel.layout: parcel.blobs}
