"""Saves and loads trees of tensors and values: the engine under Checkpointer and DictCheckpoints."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from .. import progress
from . import catalogue
from .codec import Encoder, Place, Tree, decode, shared_names
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from .fence import Fence
from .manifest import Manifest, first_fault
from .pending import PendingSave
from .ranks import Ranks
from .reading import load_tensors
from .writing import Snapshot, Writer, values_file

Templates = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as it was read: the tree of this rank, and where it came from."""

    path: Path
    manifest: Manifest
    tree: dict[str, Tree]


class Store:
    """One directory of checkpoints; construct, save and load on all ranks alike."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        """Check that the directory can be ours; it is made at the first save."""
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint has to be kept")
        self.directory = Path(directory)
        self.ranks = Ranks()
        self.ranks.from_first(lambda: catalogue.check_directory(self.directory))
        self._fence = Fence(self.directory)
        self._writer = Writer(self.directory, keep, self.ranks, self._fence)
        self._pending: PendingSave | None = None

    def save(self, step: int, tree: Mapping[str, Tree], place: Callable[[str, torch.Tensor], Place]) -> PendingSave:
        """Copy the state and write it in the background. A save still being written is waited for first; its failure is raised."""
        self.ranks.check()
        begin = time.monotonic_ns()
        with progress.in_phase(progress.Phase.SAVE):
            self._settle()
            snapshot = _take(step, tree, place)
        page = progress.page()
        if page is not None:
            if snapshot.fault is None:
                page.saved(step)
            page.save_stalled(time.monotonic_ns() - begin)
        self._pending = PendingSave(step, lambda: self._write(snapshot))
        return self._pending

    def _write(self, snapshot: Snapshot) -> None:
        self._writer.write(snapshot)
        if (page := progress.page()) is not None:
            page.durable(snapshot.step)

    def check(self) -> None:
        """Raise the failure of a save that has ended; never waits."""
        if self._pending is not None and self._pending.done:
            self._settle()

    def wait(self) -> None:
        """Wait until nothing is being written; raise CheckpointError if the last save failed."""
        begin = time.monotonic_ns()
        with progress.in_phase(progress.Phase.SAVE):
            self._settle()
        if (page := progress.page()) is not None:
            page.save_stalled(time.monotonic_ns() - begin)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.seen:
            pending.result()

    def load(self, templates: Templates, entries: Collection[str] | None = None) -> Loaded | None:
        """The newest checkpoint that is whole, the same one on all ranks; None where there is none at all.

        Tensors come sharded and placed as those of the same name that `templates` returns (called only if there is something to load:
        making them may initialise an optimizer, which a fresh start must not); `entries` limits what is read to these top-level names.
        """
        self.ranks.check()
        self.wait()
        self.ranks.from_first(self._claim)
        candidates = self.ranks.from_first(lambda: catalogue.found_in(self.directory))
        damaged = 0
        for found in candidates:
            fault, loaded = found.fault, None
            if found.manifest is not None:
                fault, loaded = self._try(found.path, found.manifest, templates, entries)
            if loaded is not None:
                return loaded
            if self.ranks.rank == 0:
                print(f"goodrun: checkpoint {found.path.name} is skipped: {fault}", file=sys.stderr, flush=True)
            damaged += found.manifest is not None or (found.path / "manifest.json").exists()
        if damaged:
            raise CheckpointDamaged(
                f"none of the {damaged} checkpoints in {self.directory} is whole: move them away to begin from step 0, or restore a copy"
            )
        return None

    def _claim(self) -> None:
        if self.directory.is_dir():  # nothing is written for a mere look at a directory that is not there yet
            self._fence.claim()

    def _try(
        self, path: Path, manifest: Manifest, templates: Templates, entries: Collection[str] | None
    ) -> tuple[str | None, Loaded | None]:
        """Verify and read one checkpoint: (None, it) on all ranks, or (what is wrong, None) on all ranks."""
        ranks = self.ranks
        # Each rank verifies its part of the files, so the time does not grow with the number of ranks that wrote.
        files = sorted(manifest.files.items())
        fault = _first(ranks.gather(first_fault(path, files[ranks.rank :: ranks.size])))
        if fault is not None:
            return fault, None
        like = templates()
        tree: dict[str, Tree] = {}
        error: CheckpointError | None = None
        try:
            own = values_file(ranks.rank) if values_file(ranks.rank) in manifest.files else values_file(0)
            values: dict[str, Any] = json.loads((path / own).read_bytes())
            if entries is not None:
                values = {name: values[name] for name in values if name in entries}
            tree = decode(values, load_tensors(path, shared_names(values), like, ranks))
        except CheckpointMismatch as e:
            error = e
        except (CheckpointException, Exception) as e:  # CheckpointException is a BaseException; any failure means: try the one before
            error = CheckpointDamaged(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else e!r}")
        errors = [fault for fault in ranks.gather(error) if fault is not None]
        for mismatch in (e for e in errors if isinstance(e, CheckpointMismatch)):
            raise mismatch
        return (str(errors[0]), None) if errors else (None, Loaded(path, manifest, tree))


def _first(faults: list[str | None]) -> str | None:
    return next((fault for fault in faults if fault is not None), None)


def _take(step: int, tree: Mapping[str, Tree], place: Callable[[str, torch.Tensor], Place]) -> Snapshot:
    encoder = Encoder(place)
    try:
        values = {name: encoder.encode(value, name) for name, value in tree.items()}
        # Every tensor is copied, 0-dim ones on the CPU too: DCP stages those by reference, and the next step would change them.
        tensors = {name: t.to("cpu", copy=True) for name, t in encoder.shared.items()}
    except Exception as e:  # the peers are about to enter the save: they have to learn that this rank cannot
        return Snapshot(step, {}, {}, str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}")
    return Snapshot(step, tensors, values)
