"""Which checkpoint is restored, decided once for all ranks, and how one is read: checked, and with nothing touched if it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from .codec import Tree, decode, shared_names
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, StorageTrouble, StorageUnreachable
from .fence import Token
from .fetch import Files, Slots, Source, check_fit, dtype_of, fill, needed
from .index import Index, read_index
from .manifest import INDEX_FILE, Manifest, checked_bytes, shard_file, values_file
from .memory import SlotShape
from .places import Where, storage_at
from .ranks import Ranks
from .url import Url
from .wire import Gone, Line

MEMORY = "the keeper's memory"
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Wanted:
    """What the script asks for. `templates` makes the tensors to read into; called only if there is a checkpoint."""

    templates: Callable[[], Mapping[str, torch.Tensor]]
    entries: frozenset[str]
    exact: frozenset[str] = frozenset()
    """Entries whose tensors must be those of the checkpoint, name by name."""
    optional: frozenset[str] = frozenset()
    """Entries that the script does not name itself."""
    strict: bool = True
    cast: bool = False


@dataclass(frozen=True)
class Offer:
    """A checkpoint that could be restored, in memory or on storage."""

    step: int
    world_size: int
    started: int
    generation: int
    path: Where
    entries: tuple[str, ...]
    index: Callable[[], Index]
    values: Callable[[int], bytes]
    source: Callable[[ExitStack], Source]
    tier: str


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as it was read: the tree of this rank, and where it came from."""

    path: Where
    step: int
    world_size: int
    entries: tuple[str, ...]
    tree: dict[str, Tree]
    tier: str
    skipped: tuple[str, ...] = ()
    """What a restore that is not strict left as it was, or left out."""


@dataclass
class _Ready:
    """A checkpoint that fits, before anything is touched."""

    index: Index
    values: dict[str, Any]
    templates: Mapping[str, torch.Tensor]
    names: set[str]
    skipped: list[str] = field(default_factory=list)


def stored(path: Where, manifest: Manifest) -> Offer:
    """A committed checkpoint as an offer."""

    def values(rank: int) -> bytes:
        name = values_file(rank) if values_file(rank) in manifest.files else values_file(0)
        return checked_bytes(path, name, manifest)

    return Offer(
        step=manifest.step,
        world_size=manifest.world_size,
        started=manifest.started,
        generation=manifest.generation,
        path=path,
        entries=manifest.entries,
        index=lambda: read_index(checked_bytes(path, INDEX_FILE, manifest)),
        values=values,
        source=lambda files: _source(path, manifest, files),
        tier="storage",
    )


def _source(path: Where, manifest: Manifest, files: ExitStack) -> Source:
    if isinstance(path, Url):
        from .remote.ranges import Ranges

        return Ranges(path, manifest, storage_at(path))
    return Files(path, manifest, files)


def in_memory(line: Line, directory: Where, by: Token) -> Offer | None:
    """The newest snapshot that the keeper has whole in its memory; `by` asks for it, to go on from there."""
    got = parts_of(line, {"op": "newest", "directory": str(directory), "by": by})
    if got is None:
        return None
    m, index, slots = got
    started, generation = m["token"]
    return Offer(
        step=m["step"],
        world_size=m["world"],
        started=started,
        generation=generation,
        path=directory / m["name"],
        entries=tuple(m["entries"]),
        index=lambda: read_index(index),
        values=lambda rank: slots.values.get(rank, slots.values[0]),
        source=lambda files: slots,
        tier=MEMORY,
    )


def parts_of(line: Line, question: dict[str, Any]) -> tuple[dict[str, Any], bytes, Slots] | None:
    """A snapshot's description, its index, and those of its parts that the keeper has; None where it has it no more."""
    try:
        line.send(question)
        m, index, _ = said(line)
        if m["op"] != "newest":
            return None
        slots = Slots()
        for _ in range(m["parts"]):
            part, _, fds = said(line)
            slots.add(part["rank"], shard_file(part["rank"]), fds[0], SlotShape(part["shard"], part["cap"]), part["values"])
    except Gone:
        return None
    return m, index, slots


def said(line: Line) -> tuple[dict[str, Any], bytes, list[int]]:
    """The keeper's answer; what it says to all ranks in between is left out."""
    while True:
        whole = line.receive(_PATIENCE_S)
        if whole is None:
            raise Gone
        if whole[0]["op"] in ("newest", "nothing", "part", "settled", "held"):
            return whole


def settle(line: Line, directory: Where) -> None:
    """Wait until the keeper has written all that is whole: what an attempt before this one has finished counts."""
    try:
        line.send({"op": "settle", "directory": str(directory)})
        said(line)
    except Gone:
        pass  # then there is nothing to wait for


def read(offer: Offer, wanted: Wanted, ranks: Ranks) -> tuple[str | None, Loaded | None]:
    """Read one checkpoint on all ranks: (None, it), or (what is wrong, None) on all. Raises CheckpointMismatch where it does not fit."""
    ready, fault = _guarded(lambda: _prepare(offer, wanted, ranks))
    if (why := _agree(fault, ranks)) is not None:
        return why, None
    assert ready is not None
    tree, fault = _guarded(lambda: _take(offer, ready, ranks))
    if (why := _agree(fault, ranks)) is not None:
        return why, None
    assert tree is not None
    loaded = Loaded(offer.path, offer.step, offer.world_size, offer.entries, tree, offer.tier, tuple(ready.skipped))
    return None, loaded


def _guarded(work: Callable[[], Any]) -> tuple[Any, CheckpointError | None]:
    try:
        return work(), None
    except CheckpointError as e:
        return None, e
    except StorageTrouble as e:
        return None, StorageUnreachable(f"{e.filename} cannot be read: {e.strerror}")
    except Exception as e:  # any failure to read means: try the one before; the peers wait for the word
        return None, CheckpointDamaged(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else e!r}")


def _agree(mine: CheckpointError | None, ranks: Ranks) -> str | None:
    errors = [e for e in ranks.gather(mine) if e is not None]
    for final in (e for e in errors if isinstance(e, CheckpointMismatch | StorageUnreachable)):
        raise final
    return str(errors[0]) if errors else None


def _prepare(offer: Offer, wanted: Wanted, ranks: Ranks) -> _Ready:
    index = offer.index()
    values: dict[str, Any] = json.loads(offer.values(ranks.rank))
    missing = sorted(wanted.entries - set(values))
    unexpected = sorted(set(values) - wanted.entries - wanted.optional)
    kept = {name: value for name, value in values.items() if name in wanted.entries | wanted.optional}
    names = shared_names(kept)
    templates = wanted.templates()
    for entry in sorted(wanted.exact & set(kept)):
        ours = {n for n in templates if n.startswith(f"{entry}.")}
        theirs = {n for n in names if n.startswith(f"{entry}.")}
        missing += sorted(ours - theirs)
        unexpected += sorted(theirs - ours)
    skipped = [f"{n} is not in the checkpoint and stays as it is" for n in missing]
    skipped += [f"{n} is in the checkpoint and is left out" for n in unexpected]
    if wanted.strict and skipped:
        raise CheckpointMismatch(_differences(offer, missing, unexpected))
    names -= set(unexpected)
    check_fit(index, names, templates, str(offer.path), cast=wanted.cast)
    return _Ready(index, kept, templates, names, skipped)


def _differences(offer: Offer, missing: list[str], unexpected: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it does not hold {', '.join(map(repr, missing))}, which this script has")
    if unexpected:
        parts.append(f"it holds {', '.join(map(repr, unexpected))}, which this script has not")
    return f"{offer.path} does not fit: {'; '.join(parts)}. restore(strict=False) takes what there is and says what it skipped"


def _take(offer: Offer, ready: _Ready, ranks: Ranks) -> dict[str, Tree]:
    found: dict[str, torch.Tensor] = {}
    with ExitStack() as files:
        source = offer.source(files)
        for name in sorted(ready.names, key=lambda n: [c.at for c in ready.index.tensors[n].chunks[:1]]):
            entry, target = ready.index.tensors[name], ready.templates.get(name)
            found[name] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype)) if target is None else target
        source.expect(chunk for name, target in found.items() for chunk in needed(ready.index.tensors[name], target))
        for name, target in found.items():
            fill(name, ready.index.tensors[name], target, source)
        source.check_rest(ready.index, ranks.rank, ranks.size)  # each rank its part: the time does not grow with the ranks that wrote
    return {name: decode(value, found) for name, value in ready.values.items()}
