"""The commit mark of a checkpoint: what it consists of, byte for byte; without a manifest that fits there is no checkpoint."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import CheckpointDamaged, StorageTrouble, StorageUnreachable
from .places import Where, storage_at

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.json"
FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was committed. Files map to (bytes, crc32): a checksum against bad storage, not against forgery."""

    step: int
    world_size: int
    started: int
    generation: int
    torch: str
    entries: tuple[str, ...]
    files: Mapping[str, tuple[int, int]]
    items: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The crc32 of the bytes of every tensor in a shard file, in the order of the index: what a reader checks while it reads."""
    committed: float = 0.0
    """Seconds of wall time."""
    vouched: int | None = None
    """The newest step whose numbers were known to be good when this was taken; None where that was not said."""
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file's content, which carries a checksum of itself."""
        body = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(body.encode()), "body": json.loads(body)}, sort_keys=True, indent=1).encode()


def read_manifest(checkpoint: Where, name: str = MANIFEST_FILE) -> Manifest:
    """The manifest of the checkpoint at this path; CheckpointDamaged says what is wrong with it."""
    try:
        whole: Any = json.loads(storage_at(checkpoint).read(checkpoint / name))
        body = whole["body"]
        if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != whole["crc32"]:
            raise CheckpointDamaged(f"{name} does not match its own checksum")
        if body["version"] != FORMAT_VERSION:
            raise CheckpointDamaged(f"{name} has version {body['version']}, this goodrun reads {FORMAT_VERSION}")
        files = {name: (int(size), int(crc)) for name, (size, crc) in body.pop("files").items()}
        items = {name: tuple(map(int, crcs)) for name, crcs in body.pop("items").items()}
        return Manifest(files=files, items=items, entries=tuple(body.pop("entries")), **body)
    except FileNotFoundError:
        raise CheckpointDamaged("it was never committed") from None
    except StorageTrouble as e:
        raise StorageUnreachable(f"{checkpoint} cannot be read: {e.strerror}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointDamaged(f"{name} cannot be read ({type(e).__name__}: {e})") from None


def checksum(path: Where) -> tuple[int, int]:
    """Bytes and crc32 of a file, as they are read back."""
    size = crc = 0
    for block in storage_at(path).blocks(path):
        size += len(block)
        crc = zlib.crc32(block, crc)
    return size, crc


def first_fault(checkpoint: Where, files: Iterable[tuple[str, tuple[int, int]]]) -> str | None:
    """The first of these files that is not what was committed, in words; None if all are."""
    for name, expected in files:
        try:
            found = checksum(checkpoint / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as e:
            return f"{name} cannot be read ({e})"
        if (fault := difference(name, found, expected)) is not None:
            return fault
    return None


def difference(name: str, found: tuple[int, int], expected: tuple[int, int]) -> str | None:
    """How a file differs from what was committed, in words."""
    if found[0] != expected[0]:
        return f"{name} has {found[0]} bytes instead of {expected[0]}"
    if found[1] != expected[1]:
        return f"{name} does not match its checksum"
    return None


def checked_bytes(checkpoint: Where, name: str, manifest: Manifest) -> bytes:
    """The content of a small file; CheckpointDamaged if it is not what was committed."""
    if name not in manifest.files:
        raise CheckpointDamaged(f"the manifest does not name {name}")
    try:
        content = storage_at(checkpoint).read(checkpoint / name)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{name} is missing") from None
    except StorageTrouble as e:
        raise StorageUnreachable(f"{checkpoint / name} cannot be read: {e.strerror}") from None
    except OSError as e:
        raise CheckpointDamaged(f"{name} cannot be read ({e})") from None
    if (fault := difference(name, (len(content), zlib.crc32(content)), manifest.files[name])) is not None:
        raise CheckpointDamaged(fault)
    return content


def values_file(rank: int) -> str:
    """The name of the file with what rank `rank` keeps for itself and all that is not a tensor."""
    return f"values-{rank}.json"


def shard_file(rank: int) -> str:
    """The name of the file with the tensors, or parts of tensors, that rank `rank` wrote."""
    return f"__{rank}_0.distcp"
