"""Saves and loads trees of tensors and values: the engine under Checkpointer and DictCheckpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from .. import progress
from . import catalogue
from .claim import Claim
from .codec import Place, Tree
from .distrust import Distrust, distrusts, mark
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, StorageUnreachable
from .fence import Token
from .leaving import shared_words
from .manifest import INDEX_FILE, Manifest
from .neighbours import among_nodes
from .pending import PendingSave
from .places import Where, located, storage_at
from .planning import capture
from .ranks import Ranks
from .rehearsal import placed
from .restoring import Loaded, Offer, Wanted, in_memory, read, settle, stored
from .retention import Keep
from .saving import WHEN_BUSY, Saver
from .stock import stock
from .wire import ADDRESS_VARIABLE, RESTORE_VARIABLE


class Store:
    """One directory of checkpoints; construct, save and load on all ranks alike."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | Keep = 3, when_busy: str = "wait") -> None:
        """Check that the directory can be ours; it is made at the first save."""
        if when_busy not in WHEN_BUSY:
            raise ValueError(f"when_busy={when_busy!r}: it is one of {', '.join(WHEN_BUSY)}")
        keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self.directory = placed(directory)
        if str(self.directory).startswith("memory://"):
            raise CheckpointError("memory:// lives in one process: what the keeper puts there no rank can read; ObjectStoreWriter takes it")
        self.ranks = Ranks()
        self._claim = Claim(self.directory, self.ranks)
        self._distrusts = distrusts()
        self._saver = Saver(self.directory, keep, self.ranks, when_busy, self._claim.token)

    # -- saving --------------------------------------------------------------------------------------------------------

    def prepare(self, tree: Callable[[], Mapping[str, Tree]], place: Callable[[str, torch.Tensor], Place]) -> None:
        """Make the plan and have the slots made, ahead of the first save."""
        self.ranks.check()
        self._saver.prepare(capture(tree(), place))

    def save(
        self,
        step: int,
        tree: Callable[[], Mapping[str, Tree]],
        place: Callable[[str, torch.Tensor], Place],
        *,
        when_busy: str | None = None,
    ) -> PendingSave:
        """Take a snapshot of the state that `tree` gives; it becomes durable in the background."""
        self.ranks.check()
        begin = time.monotonic_ns()
        with progress.in_phase(progress.Phase.SAVE):
            state = capture(tree(), place)
            pending = self._saver.save(step, state, when_busy=when_busy)
        pending.stall_s = (time.monotonic_ns() - begin) / 1e9
        if (page := progress.page()) is not None:
            if state.fault is None and not pending.skipped:
                page.saved(step)
            page.save_stalled(time.monotonic_ns() - begin)
        return pending

    def note(self, text: str) -> None:
        """Have the launcher keep something in the record."""
        self._saver.link.tell({"op": "note", "text": text})

    def check(self) -> None:
        """Say what became of saves that have ended; never waits."""
        self._saver.check()

    def wait(self) -> None:
        """Wait until nothing is being written; raise CheckpointError if the last save failed."""
        begin = time.monotonic_ns()
        with progress.in_phase(progress.Phase.SAVE):
            self._saver.wait()
        if (page := progress.page()) is not None:
            page.save_stalled(time.monotonic_ns() - begin)

    def shared_page(self) -> memoryview | None:
        """What the ranks of this node share to agree on a step, once the keeper has sent it; None where ranks are on several nodes."""
        if self._saver.link.page < 0 or self.ranks.size != len(self.ranks.local):
            return None
        fd, self._saver.link.page = self._saver.link.page, -1
        return shared_words(fd)

    def close(self) -> None:
        """Wait, and give the memory back."""
        self.wait()
        self._saver.close()

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, wanted: Wanted, source: str | os.PathLike[str] | int | None = None) -> Loaded | None:
        """The newest checkpoint that is whole (or the one `source` names), the same on all ranks; None where there is none at all."""
        self.ranks.check()
        self.wait()
        recent = self._meet_keeper()
        source = source if source is not None else os.environ.get(RESTORE_VARIABLE)
        self._claim.hurry(self._claim.again and recent is not None)
        self._claim.token()
        found: list[catalogue.Found] = []  # rank 0 alone looks, and no further than it has to
        damaged = 0
        count, memory_at, unreachable = self.ranks.from_first(lambda: self._look(found, recent, source))
        self._claim.hurry(False)
        for number in range(count + 1):
            if number == memory_at and recent is not None:
                fault, loaded = read(recent, wanted, self.ranks)
                if loaded is not None:
                    return loaded
                self._skip(recent.path.name, fault)
            if number == count:
                break
            candidate = self.ranks.from_first(lambda n=number: self._seen(found[n], named=source is not None))  # type: ignore[misc]
            fault, loaded = candidate.fault, None
            if candidate.manifest is not None:
                fault, loaded = read(stored(candidate.path, candidate.manifest), wanted, self.ranks)
            elif candidate.torchs:
                fault, loaded = read(stock(candidate.path), wanted, self.ranks)
            if loaded is not None:
                return loaded
            self._skip(candidate.path.name, fault)
            damaged += candidate.marked
        if unreachable:
            raise StorageUnreachable(unreachable)
        if source is not None:
            raise CheckpointMismatch(f"there is no whole checkpoint {source} in {self.directory} to restore from")
        if damaged:
            raise CheckpointDamaged(
                f"none of the {damaged} checkpoints in {self.directory} is whole: move them away to begin from step 0, or restore a copy"
            )
        return None

    def _look(
        self, found: list[catalogue.Found], recent: Offer | None, source: str | os.PathLike[str] | int | None
    ) -> tuple[int, int, str]:
        """How many stored ones there are to try, before which of them the one in memory comes, and why storage could not be asked."""
        try:
            found.extend(self._candidates(source))
            return len(found), _rank_of_memory(recent, found, source, self._started), ""
        except (OSError, StorageUnreachable) as e:
            why = f"{self.directory} cannot be looked at: {e.strerror if isinstance(e, OSError) else e}"
            if not self._claim.again or recent is None or recent.started != self._started:
                raise StorageUnreachable(why) from None
            return 0, 0, why  # of this run nothing newer than what is in memory was ever written

    def _told(self, manifest: Manifest | None) -> Distrust | None:
        """What the launcher has told against restoring from this checkpoint."""
        return next((d for d in self._distrusts if manifest and d.covers(manifest.step, manifest.started, manifest.generation)), None)

    def _seen(self, found: catalogue.Found, *, named: bool) -> _Candidate:
        manifest, fault, told = found.manifest, found.fault, self._told(found.manifest)
        if told is not None:
            manifest, fault = None, f"it is not trusted: {told.why}"
            with suppress(OSError):  # then this run alone knows it
                mark(found.path, told.why)
        torchs = False
        if named and found.manifest is None:
            entries = storage_at(found.path).entries(found.path)
            torchs = ".metadata" in entries and INDEX_FILE not in entries
        trusted = told is None and found.distrusted is None
        return _Candidate(found.path, manifest, fault, torchs, trusted and found.marked)

    @property
    def _started(self) -> int:
        return self._claim.token().started

    def tell_skipped(self, loaded: Loaded) -> None:
        """Say what a restore that was not strict has left out."""
        if loaded.skipped and self.ranks.rank == 0:
            print(f"goodrun: {loaded.path.name}: {'; '.join(loaded.skipped)}", file=sys.stderr, flush=True)

    def _skip(self, name: str, fault: str | None) -> None:
        if self.ranks.rank == 0:
            print(f"goodrun: checkpoint {name} is skipped: {fault}", file=sys.stderr, flush=True)

    def _meet_keeper(self) -> Offer | None:
        """Let the keeper finish what an earlier attempt left whole, or offer it from memory; an offer only if every rank has the same."""
        mine: Offer | None = None
        line, directory = self._saver.link.find(), self._saver.link.directory
        if self._claim.given and ADDRESS_VARIABLE in os.environ:
            by = self._claim.token()  # whoever is older must not be able to drop or overwrite what is about to be read
            if self.ranks.size != len(self.ranks.local):
                mine = among_nodes(line, directory, self.ranks, self._trusts, by)
            elif line is not None:
                mine = in_memory(line, directory, by)
                if mine is not None and not self._trusts(mine.step, Token(mine.started, mine.generation)):
                    mine = None
        if line is not None:
            if mine is None:
                settle(line, directory)
            line.close()
        identities = self.ranks.gather(None if mine is None else (mine.step, mine.started, mine.generation, str(mine.path)))
        return mine if mine is not None and all(i == identities[0] for i in identities) else None

    def _trusts(self, step: int, token: Token) -> bool:
        return not any(d.covers(step, token.started, token.generation) for d in self._distrusts)

    def _candidates(self, source: str | os.PathLike[str] | int | None) -> list[catalogue.Found]:
        found = catalogue.found_in(self.directory)
        if source is None:
            return found
        own = [f for f in found if f.manifest is not None and f.manifest.started == self._started and self._told(f.manifest) is None]
        if own and self._claim.given:
            return own  # the run has gone on from there already
        if isinstance(source, int) or os.fspath(source).isdigit():
            return [f for f in found if f.step == int(os.fspath(source) if not isinstance(source, int) else source)]
        return [catalogue.found_at(located(source))]


class _Candidate(NamedTuple):
    """A checkpoint as rank 0 has seen it. `torchs`: it is one of torch's own, which is only ever restored by name."""

    path: Where
    manifest: Manifest | None
    fault: str | None
    torchs: bool
    marked: bool


def _rank_of_memory(recent: Offer | None, found: list[catalogue.Found], source: object, started: int) -> int:
    """Before which of the stored ones the snapshot in memory is tried; -1 is never. Storage may have it by now, in this attempt's name."""
    if recent is None or (source is not None and recent.started != started):
        return -1
    age = (recent.step, recent.started, recent.generation)
    return next((i for i, f in enumerate(found) if age >= f.age or f.path.name == recent.path.name), len(found))
