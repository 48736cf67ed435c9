"""The commit mark of a checkpoint: what it consists of, byte for byte; without a manifest that fits there is no checkpoint."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointDamaged

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
_CHUNK = 4 << 20


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
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file's content, which carries a checksum of itself."""
        body = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"crc32": zlib.crc32(body.encode()), "body": json.loads(body)}, sort_keys=True, indent=1).encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of the checkpoint at this path; CheckpointDamaged says what is wrong with it."""
    try:
        whole: Any = json.loads((checkpoint / MANIFEST_FILE).read_bytes())
        body = whole["body"]
        if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != whole["crc32"]:
            raise CheckpointDamaged(f"{MANIFEST_FILE} does not match its own checksum")
        if body["version"] != FORMAT_VERSION:
            raise CheckpointDamaged(f"{MANIFEST_FILE} has version {body['version']}, this goodrun reads {FORMAT_VERSION}")
        files = {name: (int(size), int(crc)) for name, (size, crc) in body.pop("files").items()}
        return Manifest(files=files, entries=tuple(body.pop("entries")), **body)
    except FileNotFoundError:
        raise CheckpointDamaged("it was never committed") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointDamaged(f"{MANIFEST_FILE} cannot be read ({type(e).__name__}: {e})") from None


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and crc32 of a file, as they are read back."""
    size = crc = 0
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def first_fault(checkpoint: Path, files: Iterable[tuple[str, tuple[int, int]]]) -> str | None:
    """The first of these files that is not what was committed, in words; None if all are."""
    for name, (size, crc) in files:
        try:
            found = checksum(checkpoint / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as e:
            return f"{name} cannot be read ({e})"
        if found[0] != size:
            return f"{name} has {found[0]} bytes instead of {size}"
        if found[1] != crc:
            return f"{name} does not match its checksum"
    return None


def write_durably(path: Path, content: bytes) -> None:
    """Put a file in place whole or not at all, and make sure of it: write aside, fsync, rename, fsync the directory."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; DCP syncs files only."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
