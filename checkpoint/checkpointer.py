"""The face of a training script's checkpoints: restore, step, close."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch

from .. import progress
from . import rng
from .codec import Encoder, Place, Tree
from .entries import entries_of
from .errors import CheckpointMismatch
from .pending import PendingSave
from .store import Loaded, Store

# No keyword argument can have this name, so no object of the script can collide with it.
_RNG = "goodrun.rng"


@runtime_checkable
class _Consumer(Protocol):
    def consumed(self) -> None: ...


class Checkpointer:
    """Keeps the named objects safe: modules (bare, DDP, FSDP2), optimizers, schedulers, samplers, anything with state_dict/load_state_dict.

        ck = Checkpointer("ckpt", model=model, optimizer=optimizer, sampler=sampler, every=100)
        step = ck.restore()                # 0 at the very first start
        for batch in loader: ...; step += 1; ck.step(step)
        ck.close()

    All ranks construct and call it alike, after init_process_group (or without one: a single process). Saves are written in the
    background; a failed one is raised by the next call, and makes the process exit with status 1 if there is none. Call `close()` before
    `destroy_process_group()`. Random states are kept per rank and continue at the same world size; at another they are derived from
    (seed, step, rank). Entries named in `per_rank` belong to a rank as well (a rank that did not exist then gets rank 0's); all others are
    taken to be the same on every rank. Nothing in a checkpoint is ever run as code.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 100,
        keep: int = 3,
        seed: int = 0,
        per_rank: Collection[str] = (),
        **state: object,
    ) -> None:
        """`every`: steps between saves; `keep`: checkpoints kept. Nothing is written yet; a directory that is not ours is refused."""
        if every < 1:
            raise ValueError(f"every={every}: a checkpoint can be saved every 1, 2, 3 … steps")
        if unknown := set(per_rank) - set(state):
            raise ValueError(f"per_rank names {sorted(unknown)[0]!r}, which is not among the state given ({', '.join(state)})")
        self._every, self._seed, self._per_rank = every, seed, frozenset(per_rank)
        self._entries = entries_of(state)
        self._consumers = [obj for obj in state.values() if isinstance(obj, _Consumer)]
        self._store = Store(directory, keep=keep)

    def restore(self) -> int:
        """Load the newest whole checkpoint into the objects and return its step; 0 if there is none."""
        begin = time.monotonic()
        page = progress.page()
        if page is not None:
            page.mark(progress.Mark.RESTORE_BEGIN)
        with progress.in_phase(progress.Phase.RESTORE):
            loaded = self._store.load(self._templates, {*self._entries, _RNG})
            if loaded is not None:
                self._apply(loaded)
        if page is not None:
            if loaded is not None:
                page.restored(loaded.manifest.step, str(loaded.path))
            page.mark(progress.Mark.RESTORE_END)
        if loaded is None:
            return 0
        if self._store.ranks.rank == 0:
            sizes = f"saved at world size {loaded.manifest.world_size}, now {self._store.ranks.size}"
            took = f"{time.monotonic() - begin:.2f} s"
            print(f"goodrun: restored step {loaded.manifest.step} from {loaded.path} ({sizes}) in {took}", file=sys.stderr, flush=True)
        return loaded.manifest.step

    def step(self, n: int) -> None:
        """Say that step `n` is done: samplers among the state move on by one batch, and a checkpoint is saved when one is due."""
        for consumer in self._consumers:
            consumer.consumed()
        if (page := progress.page()) is not None:
            page.beat(step=n)
        self._store.check()
        if n % self._every == 0:
            self.save(n)

    def save(self, n: int) -> PendingSave:
        """Save now, in the background, as step `n`."""
        with progress.in_phase(progress.Phase.SAVE):
            tree: dict[str, Tree] = {name: entry.capture() for name, entry in self._entries.items()}
            tree[_RNG] = rng.capture()
            return self._store.save(n, tree, self._place)

    def wait(self) -> None:
        """Wait until nothing is being written any more; raise CheckpointError if the last save failed."""
        self._store.wait()

    def close(self) -> None:
        """The end of the script: the same as `wait`."""
        self.wait()

    def __enter__(self) -> Checkpointer:
        """Nothing happens on the way in."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """Close; where the block has failed already, that failure is the one to be seen and the save is left to the exit handler."""
        if kind is None:
            self.close()

    def _place(self, name: str, _tensor: torch.Tensor) -> Place:
        own = name.startswith(f"{_RNG}.") or name.split(".", 1)[0] in self._per_rank
        return Place.OWN if own else Place.SHARED

    def _templates(self) -> dict[str, torch.Tensor]:
        encoder = Encoder(self._place)
        for name, entry in self._entries.items():
            encoder.encode(entry.template(), name)
        return encoder.shared

    def _apply(self, loaded: Loaded) -> None:
        missing = [name for name in self._entries if name not in loaded.tree]
        if missing:
            raise CheckpointMismatch(f"{loaded.path} does not hold {missing[0]!r} (it holds {', '.join(loaded.manifest.entries)})")
        for name, entry in self._entries.items():
            try:
                entry.apply(loaded.tree[name])
            except (RuntimeError, KeyError, ValueError) as e:
                raise CheckpointMismatch(f"{name} in {loaded.path} does not fit this script's: {e}") from e
        # Last of all: whatever the objects did while loading must not have moved the generators.
        if loaded.manifest.world_size == self._store.ranks.size:
            rng.put_back(loaded.tree[_RNG])
        else:
            rng.derive(self._seed, loaded.manifest.step, self._store.ranks.rank)
