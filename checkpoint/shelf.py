"""What a keeper knows of one checkpoint directory: whose turn it is, which snapshots lie in memory, and what is to become of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from .catalogue import Found, fresh_name
from .drain import Item
from .fence import Token
from .memory import Memory, SlotShape
from .retention import Keep
from .vouching import Word

RETRY_AFTER_S = (0.25, 1.0, 4.0, 15.0, 30.0)
_NOBODY = Token(0, 0)
_HURRIED_RETRIES = 2
"""How many of these a job gets that has come to its end and waits."""


class State(Enum):
    """Where a snapshot is on its way."""

    COPYING = "copying"  # some rank has not given its part yet
    WAITING = "waiting"  # whole in memory, not written
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"
    HELD = "held"  # copies of other nodes' parts alone: it is theirs to write


@dataclass
class Layout:
    """How one rank's slots look, and the slots."""

    shape: SlotShape
    items: tuple[Item, ...]
    slots: dict[int, Memory] = field(default_factory=dict)


@dataclass
class Snapshot:
    """One step as the ranks of this node gave it, and what was copied here of other nodes' parts.

    `given` maps a rank to its slot and the size of its values.
    """

    number: int
    step: int
    token: Token
    layout: str
    given: dict[int, tuple[int, int]] = field(default_factory=dict)
    words: dict[int, Word] = field(default_factory=dict)
    """What its ranks said of their numbers when they gave it."""
    taken_t: float = field(default_factory=time.monotonic)
    state: State = State.COPYING
    tries: int = 0
    not_before: float = 0.0
    adopted: Token | None = None
    """The attempt that went on from it, where all nodes write it anew together."""
    taken_over: frozenset[int] = frozenset()
    """The ranks whose parts this node writes then."""
    doubted: bool | None = None
    """Given again, to the keeper after one that died: whether it is being looked for on storage now; False: it is not there."""
    sent: bool = False
    """Whether it was sent to the next nodes, or will not be."""

    @property
    def name(self) -> str:
        """What it is called on storage; the same on all nodes."""
        return fresh_name(self.step, self.token, self.number, self.adopted)


@dataclass
class Job:
    """What one attempt told about itself."""

    token: Token
    world_size: int
    local: tuple[int, ...]
    keep: Keep
    torch: str
    fsize: int
    layouts: dict[tuple[str, int], Layout] = field(default_factory=dict)
    blobs: dict[str, tuple[tuple[str, ...], bytes, bytes]] = field(default_factory=dict)
    """Of each layout: the entries, the index and torch's metadata, as rank 0 gave them."""
    gone: dict[int, bool] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    page: Memory | None = None
    """What the ranks of this node share to agree on a step."""
    known: dict[str, Found] = field(default_factory=dict)
    """The checkpoints there, as far as they were looked at in this attempt: one before it may have been distrusted since."""


@dataclass
class Shelf:
    """The attempts and snapshots of one directory, newest attempt last."""

    directory: str
    jobs: dict[Token, Job] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    spare: list[Memory] = field(default_factory=list)
    closing: bool = False
    claimed: Token = _NOBODY
    """The newest attempt that has asked for a snapshot."""

    @property
    def token(self) -> Token:
        """The newest attempt's."""
        return max((*self.jobs, self.claimed))

    def begins(self, job: Job) -> list[Snapshot]:
        """A new attempt is here: what older ones left unfinished can never become whole. Returns what is dropped for it."""
        known = self.jobs.setdefault(job.token, job)
        known.keep, known.local = job.keep, job.local
        dropped = [s for s in self.snapshots if s.token < job.token and s.state is State.COPYING]
        self.snapshots = [s for s in self.snapshots if s not in dropped]
        self.tidy()
        return dropped

    def tidy(self, current: tuple[Token, str] | None = None) -> None:
        """Let go of memory that no snapshot needs any more and that only older attempts, or layouts before `current`, have used."""
        for token, job in list(self.jobs.items()):
            needed = {(s.layout, r, slot) for s in self.snapshots if s.token == token for r, (slot, _) in s.given.items()}
            for (name, rank), layout in list(job.layouts.items()):
                if token == self.token and (current is None or name == current[1]):
                    continue
                going = [slot for slot in layout.slots if (name, rank, slot) not in needed]
                self.spare += [layout.slots.pop(slot) for slot in going]
                if not layout.slots:
                    del job.layouts[name, rank]
            if token != self.token and not needed:
                if job.page is not None:
                    job.page.close()
                del self.jobs[token]

    def take_spare(self, size: int) -> Memory | None:
        """Memory of this size that an earlier attempt has left: its pages are there already."""
        found = next((m for m in self.spare if m.size == size), None)
        if found is not None:
            self.spare.remove(found)
            found.holds = 0
        return found

    def drop_spares(self) -> None:
        """The attempt has its slots: what is left over goes back."""
        for memory in self.spare:
            memory.close()
        self.spare = []

    def given(self, token: Token, number: int, step: int, layout: str, rank: int, slot: int, values: int) -> Snapshot:
        """A rank has copied its part."""
        found = next((s for s in self.snapshots if (s.token, s.number) == (token, number)), None)
        if found is None:
            found = Snapshot(number, step, token, layout)
            self.snapshots.append(found)
        found.given[rank] = (slot, values)
        job = self.jobs[token]
        found.state = State.COPYING if found.state is State.HELD else found.state
        if found.state is State.COPYING and set(found.given) >= set(job.local):
            found.state = State.WAITING
        self._overwritten(found, rank, slot)
        return found

    def _overwritten(self, new: Snapshot, rank: int, slot: int) -> None:
        """Snapshots whose memory has been used again are no longer there, except for those of an older attempt."""
        over = [s for s in self.snapshots if s is not new and s.token == new.token and s.given.get(rank, (-1,))[0] == slot]
        self.snapshots = [s for s in self.snapshots if s not in over or s.layout != new.layout]
        if new.state is State.WAITING:  # whole: nobody will restore an older attempt's, or one of another layout, any more
            here = (new.token, new.layout)
            mine = [s for s in self.snapshots if (s.token, s.layout) == here]
            first = all(s is new or s.state in (State.COPYING, State.HELD) for s in mine)
            # the first may never be whole on all nodes: until the second is here, what they went on from together stays
            idle = (State.DURABLE, State.FAILED, State.HELD)
            self.snapshots = [s for s in self.snapshots if s in mine or s.state not in idle or (first and s.adopted is not None)]
            self.tidy(here)
            self.drop_spares()

    def next(self, now: float) -> Snapshot | None:
        """The oldest snapshot that is to be written now; one that failed before waits for its time, unless a newer one is whole."""
        waiting = [s for s in self.snapshots if s.state is State.WAITING]
        return next((s for s in waiting if s.not_before <= now and not s.doubted), None)

    def superseded(self, snapshot: Snapshot) -> Snapshot | None:
        """A newer snapshot that is whole in memory."""
        after = [s for s in self.snapshots if s.state is State.WAITING and (s.token, s.number) > (snapshot.token, snapshot.number)]
        return after[0] if after else None

    def overtaken(self) -> list[Snapshot]:
        """Those that wait for another try while a newer one is durable already: nobody needs them any more."""
        durable = max(((s.token, s.number) for s in self.snapshots if s.state is State.DURABLE), default=(_NOBODY, 0))
        return [s for s in self.snapshots if s.state is State.WAITING and (s.token, s.number) < durable]

    def retry_at(self, snapshot: Snapshot, now: float) -> float | None:
        """When a snapshot whose write has failed is tried again; None if it is given up."""
        limit = _HURRIED_RETRIES if self.closing else len(RETRY_AFTER_S)
        if snapshot.tries > limit:
            return None
        return now + RETRY_AFTER_S[snapshot.tries - 1]

    def writes(self, snapshot: Snapshot) -> set[int]:
        """The ranks whose parts of it this node writes, and sends to the next nodes."""
        if snapshot.adopted is not None:
            return set(snapshot.taken_over)
        return set(snapshot.given) & set(self.jobs[snapshot.token].local)

    def goes_on(self, snapshot: Snapshot, by: Token, taken_over: list[int] | None = None) -> list[Snapshot]:
        """The attempt `by` trains on from it: what storage did not take is tried anew, in its name, or would never lie there.

        Where several nodes hold it together, or held it, they write it anew, each the parts of the ranks in `taken_over`. Returns those
        that will never be whole now.
        """
        self.claimed = max(self.claimed, by)
        if taken_over is not None and snapshot.adopted != by:  # the first rank of this node that asks
            snapshot.adopted, snapshot.taken_over, snapshot.sent = by, frozenset(taken_over), False
            snapshot.tries, snapshot.not_before = 0, 0.0
            if snapshot.state is not State.WRITING:  # else once that has been given up
                snapshot.state = State.WAITING if taken_over else State.HELD
        elif taken_over is None and snapshot.state is State.FAILED:
            snapshot.state, snapshot.tries, snapshot.not_before = State.WAITING, 0, 0.0
        waiting = [s for s in self.snapshots if s.token < by and s.state is State.WAITING and s is not snapshot]
        in_vain = [s for s in waiting if len(self.writes(s)) < self.jobs[s.token].world_size]
        for s in in_vain:
            s.state = State.FAILED
        return in_vain

    def newest_whole(self) -> Snapshot | None:
        """The newest snapshot that can be restored from memory: every rank of its world gave its part here, and it is intact."""
        return next((s for s in self.intact() if len(s.given) >= self.jobs[s.token].world_size), None)

    def intact(self) -> Iterator[Snapshot]:
        """Snapshots to which every rank here has given its part, and whose memory has not been used again; newest first."""
        for snapshot in sorted(self.snapshots, key=lambda s: (s.step, s.token, s.number), reverse=True):
            job = self.jobs[snapshot.token]
            slots = ((job.layouts[snapshot.layout, rank].slots[slot]) for rank, (slot, _) in snapshot.given.items())
            if snapshot.state is not State.COPYING and all(slot.holds == snapshot.number for slot in slots):
                yield snapshot

    def busy(self, token: Token) -> list[Snapshot]:
        """Snapshots of an attempt whose slots are not free yet."""
        return [s for s in self.snapshots if s.token == token and s.state in (State.COPYING, State.WAITING, State.WRITING)]

    def may(self, token: Token, number: int, how: str, slots: int) -> tuple[bool, Snapshot | None]:
        """Whether snapshot `number` is to be taken where both slots may be busy, and which one it replaces; decided once for all ranks."""
        job = self.jobs[token]
        if number in job.decided:
            return job.decided[number], None
        busy = [s for s in self.busy(token) if s.number != number]
        replaced = None
        take = len(busy) < slots
        if not take and how == "replace":
            replaced = next((s for s in reversed(busy) if s.state is State.WAITING), None)
            take = True
        job.decided = {n: d for n, d in job.decided.items() if n > number - 16} | {number: take}
        return take, replaced
