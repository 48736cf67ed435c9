"""Checkpoints of a plain nested dict, for scripts that keep their state in one."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .codec import Encoder, Place, Tree
from .pending import PendingSave
from .restoring import Wanted
from .retention import Keep
from .store import Store

# Up to this size a tensor on the CPU may be a rank's own (a random state, a cursor): it is kept per rank.
_OWN_BYTES = 64 << 10


def _place(_name: str, tensor: torch.Tensor) -> Place:
    small = tensor.device.type == "cpu" and not isinstance(tensor, DTensor) and tensor.nbytes <= _OWN_BYTES
    # Small ones go among the shards as well, so that torch's own reader finds every tensor under its name.
    return Place.BOTH if small else Place.SHARED


class DictCheckpoints:
    """Saves a nested dict and loads it back in place.

    Values and small CPU tensors (up to 64 KiB) belong to a rank: each gets its own back, a rank that did not exist then gets rank 0's.
    Large tensors are taken to be the same on all ranks (or DTensors) and are stored once.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | Keep = 3, when_busy: str = "wait") -> None:
        """All ranks construct it; the directory is made at the first save."""
        self._store = Store(directory, keep=keep, when_busy=when_busy)

    def save(self, state: MutableMapping[str, Tree], step: int) -> PendingSave:
        """Copy `state` and write it in the background; `.result()` of what comes back waits."""
        return self._store.save(step, lambda: state, _place)

    def load(self, state: MutableMapping[str, Tree], *, source: str | int | None = None, strict: bool = True) -> int | None:
        """Fill `state` from the newest whole checkpoint: tensors are copied into, values replaced. Its step, or None if there is none.

        `source` names another one, by step or path. Where the two do not have the same names, `strict` makes it an error; without it what
        is missing stays as it is, and one line says so.
        """
        loaded = self._store.load(Wanted(lambda: _tensors(state), frozenset(state), strict=strict), source)
        if loaded is None:
            return None
        self._store.tell_skipped(loaded)
        for name in loaded.tree:
            state[name] = _fill(state[name], loaded.tree[name])
        return loaded.step

    def wait(self) -> None:
        """Wait until nothing is being written; raise CheckpointError if the last save failed."""
        self._store.wait()

    def close(self) -> None:
        """Wait, and give the memory of the snapshots back."""
        self._store.close()


def _tensors(state: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
    encoder = Encoder(lambda name, tensor: Place.SHARED)
    for name, value in state.items():
        encoder.encode(value, name)
    return encoder.shared


def _fill(old: Any, new: Any) -> Any:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        with torch.no_grad():
            return old if new is old else old.copy_(new)
    if isinstance(old, MutableMapping) and isinstance(new, dict):
        for key, value in new.items():
            old[key] = _fill(old[key], value) if key in old else value
        return old
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old[:] = [_fill(a, b) for a, b in zip(old, new, strict=True)]
        return old
    return new
