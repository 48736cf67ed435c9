"""The face of a training script's checkpoints: restore, step, close."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from types import TracebackType
from typing import NoReturn, Protocol, runtime_checkable

import torch

from .. import progress
from . import rng
from .cadence import Cadence, interval_of
from .codec import Encoder, Place, Tree
from .entries import Model, entries_of
from .errors import CheckpointError, CheckpointMismatch
from .leaving import Alone, Leaving, OnPage, OnStore
from .pending import PendingSave
from .replicas import Replicas
from .restoring import Loaded, Wanted
from .retention import Keep
from .store import Store
from .timing import Timing

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

    All ranks construct and call it alike, after init_process_group (or without one: a single process). A save costs one copy of the part
    that this rank owns; a keeper, a process beside the ranks, writes it. A save that fails is said and never ends the training; if it is
    the last one, `close()` raises it and the process exits with status 1. Random states are kept per rank and continue at the same world
    size; at another they are derived from (seed, step, rank). Entries named in `per_rank` belong to a rank as well (a rank that did not
    exist then gets rank 0's); all others are taken to be the same on every rank. Nothing in a checkpoint is ever run as code.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | str = 100,
        keep: int | Keep = 3,
        seed: int = 0,
        per_rank: Collection[str] = (),
        when_busy: str = "wait",
        check_replicas: bool = False,
        **state: object,
    ) -> None:
        """`every`: steps between saves, a time ("30s", "5m"), or "auto": where saving and redoing cost least together.

        `keep`: how many checkpoints are kept, or a rule (`Keep`).

        A save finds both slots busy where storage cannot keep up: `when_busy` is "wait", "skip" (this save) or "replace" (the one not begun
        yet). `check_replicas`: with each save tell goodrun a digest of the models that every rank holds whole (DDP); where ranks differ it
        goes back to the newest checkpoint at which they did not. Nothing is written yet; a directory that is not ours is refused.
        """
        self._cadence = Cadence(interval_of(every))
        if unknown := set(per_rank) - set(state):
            raise ValueError(f"per_rank names {sorted(unknown)[0]!r}, which is not among the state given ({', '.join(state)})")
        self._seed, self._per_rank = seed, frozenset(per_rank)
        self._entries = entries_of(state)
        models = [entry.module for entry in self._entries.values() if isinstance(entry, Model)]
        self._replicas = Replicas(models) if check_replicas else None
        self._consumers = [obj for obj in state.values() if isinstance(obj, _Consumer)]
        self._store = Store(directory, keep=keep, when_busy=when_busy)
        self._prepared = False
        ranks = self._store.ranks
        one_node = ranks.size == len(ranks.local)  # then the keeper sends a page to agree on
        self._leaving = Leaving(Alone() if ranks.size == 1 else None if one_node else OnStore(ranks.own_store(), ranks.rank, ranks.size))
        self._timing = Timing(ranks, self._store.note)

    def restore(self, source: str | os.PathLike[str] | int | None = None, *, strict: bool = True, cast: bool = False) -> int:
        """Load the newest whole checkpoint into the objects and return its step; 0 if there is none.

        `source` names another one, by step or by path. Names that only one side has are an error, unless `strict` is False: then they are
        listed and left alone. So is a tensor of another type, unless `cast` is True.
        """
        begin = time.monotonic()
        page = progress.page()
        if page is not None:
            page.mark(progress.Mark.RESTORE_BEGIN)
        exact = frozenset(name for name, entry in self._entries.items() if isinstance(entry, Model))
        wanted = Wanted(self._templates, frozenset(self._entries), exact, frozenset({_RNG}), strict=strict, cast=cast)
        with progress.in_phase(progress.Phase.RESTORE):
            loaded = self._store.load(wanted, source)
            if loaded is not None:
                self._apply(loaded, strict=strict)
        if page is not None:
            if loaded is not None:
                page.restored(loaded.step, str(loaded.path))
            page.mark(progress.Mark.RESTORE_END)
        if loaded is None:
            return 0
        if self._store.ranks.rank == 0:
            sizes = f"saved at world size {loaded.world_size}, now {self._store.ranks.size}"
            where = "" if loaded.tier == "storage" else f", out of {loaded.tier}"
            took = f"{time.monotonic() - begin:.2f} s"
            print(f"goodrun: restored step {loaded.step} from {loaded.path} ({sizes}{where}) in {took}", file=sys.stderr, flush=True)
            self._store.tell_skipped(loaded)
        return loaded.step

    def step(self, n: int, *, loss: float | None = None) -> None:
        """Say that step `n` is done: samplers among the state move on by one batch, and a checkpoint is saved when one is due.

        `loss`: if it is not finite, goodrun goes back to the newest checkpoint before the numbers went bad.
        """
        for consumer in self._consumers:
            consumer.consumed()
        if (page := progress.page()) is not None:
            page.beat(step=n)
            if loss is not None:
                page.loss(n, loss)
            if self._replicas is not None:
                self._replicas.tell(page)
        self._store.check()
        if (words := self._store.shared_page()) is not None:
            ranks = self._store.ranks
            self._leaving.share(OnPage(words, leader=ranks.rank == min(ranks.local), alone=ranks.size == 1))
        if self._leaving.due(n):
            self._leave(n)
        if self._cadence.passed(n, time.monotonic()):
            if self._cadence.saves:
                self._timing.saves(self.save(n))
            self._timing.plan(self._cadence, n)
        if not self._prepared:
            # The first step has given the optimizer its state: the memory can be made ready beside the steps before the first save.
            self._store.prepare(self._tree, self._place)
            self._leaving.watch()
            if page is not None and isinstance(self._cadence.interval, int):
                page.save_every(self._cadence.interval)
            self._prepared = True

    def _leave(self, n: int) -> NoReturn:
        """Save and go: somebody has asked the job to stop. Every rank is at the same step."""
        self._leaving.stop()
        try:
            with progress.in_phase(progress.Phase.SAVE):
                self._store.save(n, self._tree, self._place, when_busy="wait")
            self._store.wait()
            text = f"asked to stop: step {n} is saved, leaving"
            if (page := progress.page()) is not None:
                page.left(n)
        except CheckpointError as e:
            text = f"asked to stop, but {e}"
        if self._store.ranks.rank == 0:
            print(f"goodrun: {text}", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM)

    def save(self, n: int) -> PendingSave:
        """Take a snapshot now, as step `n`; it becomes durable in the background."""
        if self._replicas is not None:
            with progress.in_phase(progress.Phase.SAVE):
                self._replicas.take(n)
        return self._store.save(n, self._tree, self._place)

    def _tree(self) -> dict[str, Tree]:
        tree: dict[str, Tree] = {name: entry.capture() for name, entry in self._entries.items()}
        tree[_RNG] = rng.capture()
        return tree

    def wait(self) -> None:
        """Wait until nothing is being written any more; raise CheckpointError if the last save failed."""
        self._store.wait()

    def close(self) -> None:
        """The end of the script: `wait`, and give the memory of the snapshots back."""
        self._leaving.stop()
        self._store.close()

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

    def _apply(self, loaded: Loaded, *, strict: bool) -> None:
        for name, entry in self._entries.items():
            if name not in loaded.tree:
                continue  # a restore that is not strict has said so
            try:
                entry.apply(loaded.tree[name], strict=strict)
            except (RuntimeError, KeyError, ValueError) as e:
                raise CheckpointMismatch(f"{name} in {loaded.path} does not fit this script's: {e}") from e
        # Last of all: whatever the objects did while loading must not have moved the generators.
        if loaded.world_size == self._store.ranks.size and _RNG in loaded.tree:
            rng.put_back(loaded.tree[_RNG])
        else:
            rng.derive(self._seed, loaded.step, self._store.ranks.rank)
