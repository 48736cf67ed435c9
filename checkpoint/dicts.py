"""Checkpoints of a plain nested dict, for scripts that keep their state in one."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .codec import Encoder, Place, Tree
from .errors import CheckpointMismatch
from .pending import PendingSave
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

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        """All ranks construct it; the directory is made at the first save."""
        self._store = Store(directory, keep=keep)

    def save(self, state: MutableMapping[str, Tree], step: int) -> PendingSave:
        """Copy `state` and write it in the background; `.result()` of what comes back waits."""
        return self._store.save(step, state, _place)

    def load(self, state: MutableMapping[str, Tree]) -> int | None:
        """Fill `state` from the newest whole checkpoint: tensors are copied into, values replaced. Its step, or None if there is none."""
        loaded = self._store.load(lambda: _tensors(state), set(state))
        if loaded is None:
            return None
        missing = [name for name in state if name not in loaded.tree]
        if missing:
            raise CheckpointMismatch(f"{loaded.path} does not hold {missing[0]!r}, which the state has")
        for name in state:
            state[name] = _fill(state[name], loaded.tree[name])
        return loaded.manifest.step


def _tensors(state: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
    encoder = Encoder(lambda name, tensor: Place.SHARED)
    for name, value in state.items():
        encoder.encode(value, name)
    return encoder.shared


def _fill(old: Any, new: Any) -> Any:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        with torch.no_grad():
            return old.copy_(new)
    if isinstance(old, MutableMapping) and isinstance(new, dict):
        for key, value in new.items():
            old[key] = _fill(old[key], value) if key in old else value
        return old
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old[:] = [_fill(a, b) for a, b in zip(old, new, strict=True)]
        return old
    return new
