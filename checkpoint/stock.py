"""Reading of torch's own checkpoint format without running code from it.

`.metadata` is a pickle, and so are stock DCP's non-tensor items. The first is read by an unpickler that knows the dozen harmless
classes DCP puts there and no other; the second are never written by goodrun and refused on reading.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from .errors import CheckpointDamaged, CheckpointMismatch
from .ranks import Ranks

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if global_name not in _ALLOWED.get(module_name, ()):
            raise CheckpointDamaged(f".metadata asks for {module_name}.{global_name}, which no checkpoint needs: it will not be run")
        return super().find_class(module_name, global_name)


def read_metadata(path: Path) -> Metadata:
    """The index that DCP wrote into the checkpoint at `path`."""
    metadata = _Unpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
    if not isinstance(metadata, Metadata):
        raise CheckpointDamaged(f".metadata of {path.name} holds a {type(metadata).__name__}")
    return metadata


class SafeReader(FileSystemReader):
    """DCP's reader with the restricted unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, with the load's identity in it as DCP's own reader does."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointDamaged(f"{read_item.dest_index.fqn} is stored as a pickle: it will not be run")


def load_tensors(path: Path, names: set[str], templates: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """The tensors `names` of the checkpoint, sharded and placed as `templates` are, else whole on the CPU; templates stay untouched."""
    saved = read_metadata(path).state_dict_metadata
    wanted: dict[str, Any] = {}
    for name in names:
        meta = saved.get(name)
        if not isinstance(meta, TensorStorageMetadata):
            raise CheckpointDamaged(f"the values of {path.name} name the tensor {name}, its .metadata does not")
        like = templates.get(name)
        if like is None:
            wanted[name] = torch.empty(meta.size, dtype=meta.properties.dtype)
        elif like.shape != meta.size or like.dtype != meta.properties.dtype:
            # DCP would cast another dtype without a word.
            raise CheckpointMismatch(
                f"{name} is {meta.properties.dtype} {tuple(meta.size)} in {path}, {like.dtype} {tuple(like.shape)} in this script: "
                "give the script the model that was saved, or another directory"
            )
        else:
            wanted[name] = torch.empty_like(like, requires_grad=False)
    with without_lone_process_warning():
        load(wanted, storage_reader=SafeReader(path), planner=_TensorsOnly(), process_group=ranks.group)
    return wanted


@contextmanager
def without_lone_process_warning() -> Iterator[None]:
    """DCP warns whenever it runs without a process group; here that is a supported way of working, not an oversight."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
