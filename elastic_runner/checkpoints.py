"""What `goodrun checkpoints` answers: what lies in a checkpoint directory, whether it is whole, and what is in one. Needs no torch."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint.catalogue import Found, check_directory, found_at, found_in, prune
from ..checkpoint.errors import CheckpointDamaged, CheckpointError
from ..checkpoint.index import Index, read_index
from ..checkpoint.manifest import INDEX_FILE, MANIFEST_FILE, checked_bytes, first_fault, read_manifest
from ..checkpoint.notes import HEAD_FILE, heard, notes_among, united
from ..checkpoint.places import Where, located, storage_at
from ..checkpoint.retention import Keep
from ..checkpoint.storage import Disk


class NoSuchCheckpoint(CheckpointError):
    """The directory or the checkpoint that was asked for is not there: the caller's slip."""


def listed(directory: Where, *, verify: bool) -> list[dict[str, Any]]:
    """Every checkpoint, newest first; with `verify` every byte is read."""
    return [_described(found, verify=verify) for found in _found(directory)]


def _found(directory: Where) -> list[Found]:
    if not storage_at(directory).exists(directory):
        raise NoSuchCheckpoint(f"there is no directory {directory}: name the one that the script gave its Checkpointer")
    return found_in(directory)


def _described(found: Found, *, verify: bool) -> dict[str, Any]:
    fault, manifest = found.fault, found.manifest
    if verify and manifest is not None:
        fault = first_fault(found.path, sorted(manifest.files.items()))
    return {
        "name": found.path.name,
        "step": found.step,
        "whole": fault is None,
        "fault": fault,
        "bytes": sum(size for size, _ in manifest.files.values()) if manifest is not None else None,
        "world_size": manifest.world_size if manifest is not None else None,
        "committed": datetime.fromtimestamp(manifest.committed).isoformat(" ", "seconds") if manifest is not None else None,
        "entries": list(manifest.entries) if manifest is not None else [],
    }


def shown(directory: Where, which: str) -> dict[str, Any]:
    """One checkpoint, by step or by path, with every tensor in it."""
    if which.isdigit():
        found = next((f for f in _found(directory) if f.step == int(which)), None)
        if found is None:
            raise NoSuchCheckpoint(f"there is no checkpoint of step {which} in {directory}")
    else:
        at = located(which)
        found = found_at(at if storage_at(at).exists(at) else directory / which)
    if found.manifest is None:
        raise CheckpointDamaged(f"{found.path}: {found.fault}")
    index: Index = read_index(checked_bytes(found.path, INDEX_FILE, found.manifest))
    tensors = {name: {"dtype": t.dtype, "shape": list(t.shape), "parts": len(t.chunks)} for name, t in index.tensors.items()}
    return {**_described(found, verify=False), "path": str(found.path), "torch": found.manifest.torch, "tensors": tensors}


def pruned(directory: Where, last: int) -> list[str]:
    """Delete all but the newest `last` and what was never committed; only once the newest has been found whole, byte by byte."""
    keep = Keep(last=last)
    newest = next((f for f in _found(directory) if f.manifest is not None), None)
    if newest is None or newest.manifest is None:
        raise NoSuchCheckpoint(f"{directory} holds no whole checkpoint: nothing is deleted")
    if (fault := first_fault(newest.path, sorted(newest.manifest.files.items()))) is not None:
        raise CheckpointDamaged(f"the newest checkpoint {newest.path.name} is damaged ({fault}): nothing is deleted")
    return [path.name for path in prune(directory, keep, newest.path, storage_at(directory))]


def uploaded(source: Path, target: Where) -> tuple[str, list[int]]:
    """Copy a checkpoint to another place, or a node's part of one; the commit mark last, once all parts are there.

    Read byte by byte first, and nothing is put where there is one. Returns where it is, and the ranks whose parts are missing there.
    """
    found = found_at(source)
    parts = heard(source, Disk())
    if found.manifest is None and not parts.ranks:
        raise CheckpointDamaged(f"{source} is no whole checkpoint: {found.fault}")
    files = parts.files if found.manifest is None else found.manifest.files
    if found.manifest is None and (source / HEAD_FILE).exists():
        files = {**read_manifest(source, HEAD_FILE).files, **files}
    if (fault := first_fault(source, sorted(files.items()))) is not None:
        raise CheckpointDamaged(f"{source} is damaged ({fault}): nothing is uploaded")
    check_directory(target)
    storage, into = storage_at(target), target / source.name
    if storage.exists(into / MANIFEST_FILE):
        raise CheckpointError(f"{into} is there already")
    storage.make_directory(into)
    marks = [MANIFEST_FILE] if found.manifest is not None else [*notes_among(os.listdir(source)), HEAD_FILE]
    for name in [*sorted(files), *(mark for mark in marks if (source / mark).exists())]:
        storage.write(into / name, Disk().blocks(source / name))
    return str(into), [] if found.manifest is not None else united(into, storage)


def table(rows: list[dict[str, Any]]) -> str:
    """The list for people."""
    lines = [f"{'step':>10}  {'size':>9}  {'world':>5}  {'committed':19}  state"]
    for row in rows:
        size = "" if row["bytes"] is None else _size(row["bytes"])
        state = "whole" if row["whole"] else f"DAMAGED: {row['fault']}" if row["bytes"] is not None else f"not one: {row['fault']}"
        lines.append(f"{row['step']:>10}  {size:>9}  {row['world_size'] or '':>5}  {row['committed'] or '':19}  {state}  {row['name']}")
    return "\n".join(lines) + "\n"


def contents(one: dict[str, Any]) -> str:
    """One checkpoint for people."""
    how = f"saved at world size {one['world_size']} on {one['committed']} with torch {one['torch']}"
    head = f"step {one['step']}, {how}, {_size(one['bytes'])}"
    width = max((len(name) for name in one["tensors"]), default=0)
    lines = [head, one["path"], f"entries: {', '.join(one['entries'])}"]
    lines += [f"  {name:{width}}  {t['dtype']:10} {tuple(t['shape'])}" for name, t in one["tensors"].items()]
    return "\n".join(lines) + "\n"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
