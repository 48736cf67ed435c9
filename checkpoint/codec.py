"""State as JSON: everything but big tensors is kept as text that can be read back without running code."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any, TypeAlias

import torch

from .errors import CheckpointError, CheckpointMismatch

# A tree is what state_dict() returns: nested dicts, lists and tuples of tensors and values. Only torch knows its shape.
Tree: TypeAlias = Any
Json: TypeAlias = Any
Path: TypeAlias = tuple[str | int, ...]

_KIND = "$"


class Place(Enum):
    """Where a tensor is kept: among the shards shared by all ranks, in the rank's own values, or in both."""

    SHARED = auto()
    OWN = auto()
    BOTH = auto()


class Encoder:
    """Turns a tree into JSON and puts the tensors that belong to all ranks aside."""

    def __init__(self, place: Callable[[str, torch.Tensor], Place]) -> None:
        """`place` decides for each tensor, by its dotted name."""
        self._place = place
        self.shared: dict[str, torch.Tensor] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Where in the tree each shared tensor was, as torch's own format keeps it."""

    def encode(self, value: Tree, *path: str | int) -> Json:
        """The JSON form of `value`, which is to be found under `path`."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value).__module__ == "numpy":  # first: numpy's float64 is a float, too
            return self._numpy(value, path)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list):
            return self._items(value, path)
        if isinstance(value, (tuple, set, frozenset)):
            kind = "tuple" if isinstance(value, tuple) else "set"
            return {_KIND: kind, "items": self._items(value, path)}
        if isinstance(value, (bytes, bytearray)):
            return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
        raise _unsupported(value, path)

    def _items(self, values: Collection[Any], path: Path) -> Json:
        if all(type(v) is int for v in values):  # a random state is hundreds of these
            return list(values)
        return [self.encode(v, *path, i) for i, v in enumerate(values)]

    def _numpy(self, value: Any, path: Path) -> Json:
        if value.dtype.kind not in "biuf":
            raise _unsupported(value, path)
        whole = value.reshape(1).copy() if value.ndim == 0 else value.copy(order="C")
        return {_KIND: "numpy", "scalar": value.ndim == 0, "tensor": _inline(torch.from_numpy(whole))}

    def _tensor(self, value: torch.Tensor, path: Path) -> Json:
        name = ".".join(map(str, path))
        place = self._place(name, value)
        if place is not Place.OWN:
            if name in self.shared:
                raise CheckpointError(f"two tensors of the state have the name {name}: rename one")
            self.shared[name] = value
            self.paths[name] = path
        return {_KIND: "shared", "name": name} if place is Place.SHARED else _inline(value)

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Json:
        items = [(k, self.encode(v, *path, k if isinstance(k, (str, int)) else str(k))) for k, v in value.items()]
        if isinstance(value, Counter):
            return {_KIND: "counter", "items": [[self.encode(k, *path), v] for k, v in items]}
        if all(isinstance(k, str) and k != _KIND for k, _ in items):
            return dict(items)
        return {_KIND: "dict", "items": [[self.encode(k, *path), v] for k, v in items]}


def _unsupported(value: object, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{'.'.join(map(str, path))} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold: "
        "give tensors, arrays, numbers, strings, and dicts, lists and tuples of them"
    )


def _inline(value: torch.Tensor) -> Json:
    whole = value.detach().cpu().contiguous()
    raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    dtype = str(whole.dtype).removeprefix("torch.")
    return {_KIND: "tensor", "dtype": dtype, "shape": list(whole.shape), "data": base64.b64encode(raw).decode()}


def shared_names(tree: Json) -> set[str]:
    """The names of the shared tensors that an encoded tree refers to."""
    if isinstance(tree, list):
        return set().union(*(shared_names(v) for v in tree))
    if not isinstance(tree, dict):
        return set()
    if tree.get(_KIND) == "shared":
        return {tree["name"]}
    return set().union(*(shared_names(v) for v in tree.values()))


def decode(tree: Json, shared: Mapping[str, torch.Tensor]) -> Tree:
    """The tree that was encoded, with its shared tensors taken from `shared`."""
    if isinstance(tree, list):
        return [decode(v, shared) for v in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_KIND)
    if kind is None:
        return {k: decode(v, shared) for k, v in tree.items()}
    if kind == "shared":
        return shared[tree["name"]]
    if kind == "tensor":
        return _tensor_from(tree)
    if kind == "numpy":
        array = _tensor_from(tree["tensor"]).numpy()
        return array[0] if tree["scalar"] else array
    if kind == "bytes":
        return base64.b64decode(tree["data"])
    if kind == "dtype":
        return _dtype(tree["name"])
    if kind in ("dict", "counter"):
        pairs = {decode(k, shared): decode(v, shared) for k, v in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    if kind in ("tuple", "set"):
        items = [decode(v, shared) for v in tree["items"]]
        return tuple(items) if kind == "tuple" else set(items)
    raise CheckpointMismatch(f"the checkpoint holds a value of kind {kind!r}: it was written by a newer goodrun, use that one")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointMismatch(f"the checkpoint holds the dtype {name!r}, which this torch does not have")
    return dtype


def _tensor_from(tree: Json) -> torch.Tensor:
    raw = bytearray(base64.b64decode(tree["data"]))
    if not raw:
        return torch.empty(tree["shape"], dtype=_dtype(tree["dtype"]))
    return torch.frombuffer(raw, dtype=torch.uint8).view(_dtype(tree["dtype"])).reshape(tree["shape"]).clone()
