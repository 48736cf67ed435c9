"""Whether two takes have ended with the same tensors: their newest checkpoints compared, by checksum where that tells, else by value."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.catalogue import Found, found_in
from ...checkpoint.index import Index, TensorEntry, read_index
from ...checkpoint.manifest import INDEX_FILE, Manifest, checked_bytes, first_fault
from ...checkpoint.rehearsal import CHECKPOINTS

_RANDOM = "goodrun.rng."
"""How the names of random states begin: a rank's own, and none of the model's."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of one checkpoint directory. `apart` is the relative difference of all tensors together, 0 if they are equal to the last bit."""

    directory: str
    step: int
    apart: float = 0.0
    worst: str = ""
    """The tensor that differs most."""
    fault: str = ""
    """Why there is nothing to compare."""
    same_size: bool = True
    """Whether both were written at the same world size."""


def compare(quiet: Path, hurt: Path) -> list[Comparison]:
    """Every checkpoint directory of the quiet take beside the same one of the other."""
    return [_directory(path.relative_to(quiet / CHECKPOINTS), path, hurt) for path in _directories(quiet / CHECKPOINTS)]


def _directories(root: Path) -> list[Path]:
    return sorted({path.parents[1] for path in root.rglob("manifest.json")})


def _directory(name: Path, quiet: Path, hurt: Path) -> Comparison:
    where = "/" + str(name)
    ours = next(f for f in found_in(quiet) if f.manifest is not None)
    theirs = next((f for f in found_in(hurt / CHECKPOINTS / name) if f.manifest is not None), None)
    if theirs is None or theirs.step != ours.step:
        has = "none" if theirs is None else f"that of step {theirs.step}"
        return Comparison(directory=where, step=ours.step, fault=f"the newest checkpoint is {has}, not that of step {ours.step}")
    assert theirs.manifest is not None
    if (fault := first_fault(theirs.path, sorted(theirs.manifest.files.items()))) is not None:
        return Comparison(directory=where, step=ours.step, fault=f"the checkpoint of step {ours.step} is damaged: {fault}")
    return _tensors(where, ours, theirs)


def _tensors(where: str, ours: Found, theirs: Found) -> Comparison:
    assert ours.manifest is not None and theirs.manifest is not None
    a, b = (read_index(checked_bytes(f.path, INDEX_FILE, f.manifest)) for f in (ours, theirs) if f.manifest is not None)
    names = sorted(n for n in a.tensors if not n.startswith(_RANDOM))
    theirs_named = sorted(n for n in b.tensors if not n.startswith(_RANDOM))
    same_size = ours.manifest.world_size == theirs.manifest.world_size
    if names != theirs_named:
        odd = min(set(names) ^ set(theirs_named))
        return Comparison(directory=where, step=ours.step, fault=f"only one of the two has the tensor {odd}", same_size=same_size)
    squares, scale, worst, worst_apart = 0.0, 0.0, "", 0.0
    with ExitStack() as files:
        for name in names:
            if _sums(a.tensors[name], ours.manifest) == _sums(b.tensors[name], theirs.manifest):
                continue
            d, s = _apart(name, (a, ours), (b, theirs), files)
            squares, scale = squares + d, scale + s
            if d > 0 and (not worst or d / max(s, 1e-300) > worst_apart):
                worst, worst_apart = name, d / max(s, 1e-300)
    apart = math.sqrt(squares / scale) if scale else float(squares > 0)
    return Comparison(directory=where, step=ours.step, apart=apart, worst=worst, same_size=same_size)


def _sums(entry: TensorEntry, manifest: Manifest) -> object:
    """What says that two tensors are equal without reading them: type, shape, and how they are cut with the checksum of each part."""
    return entry.dtype, entry.shape, [(c.box.offset, c.box.size, manifest.items[c.file][c.item]) for c in entry.chunks]


def _apart(name: str, one: tuple[Index, Found], other: tuple[Index, Found], files: ExitStack) -> tuple[float, float]:
    """(the sum of squares of the difference, that of the first): infinite apart if type or shape differ."""
    import torch

    from ...checkpoint.fetch import Files, dtype_of, fill

    read = []
    for index, found in (one, other):
        assert found.manifest is not None and isinstance(found.path, Path)  # a rehearsal's lie in its folder
        entry = index.tensors[name]
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        fill(name, entry, tensor, Files(found.path, found.manifest, files))
        read.append(tensor)
    if read[0].shape != read[1].shape or read[0].dtype != read[1].dtype:
        return math.inf, 1.0
    a, b = (t.double() if not t.is_complex() else torch.view_as_real(t).double() for t in read)
    same = (a == b) | (a.isnan() & b.isnan())
    return float((torch.where(same, 0.0, a - b).nan_to_num(nan=math.inf) ** 2).sum()), float((a.nan_to_num() ** 2).sum())
