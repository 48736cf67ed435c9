"""One save, from the copy taken of the state to the commit mark; every rank runs it in its background thread."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import catalogue
from .codec import Json
from .errors import CheckpointError
from .fence import Fence
from .manifest import MANIFEST_FILE, Manifest, checksum, sync_directory, write_durably
from .ranks import Ranks
from .reading import read_metadata, without_lone_process_warning


@dataclass(frozen=True)
class Snapshot:
    """A copy of this rank's state that nothing changes any more; `fault` says why it could not be taken."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Json]
    fault: str | None = None


def values_file(rank: int) -> str:
    """The name of the file with what rank `rank` keeps for itself and all that is not a tensor."""
    return f"values-{rank}.json"


class _PlainWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As DCP does it, but a full disk is reported as such, not as the zip writer's astonishment over it."""
        try:
            return super().write_data(plan, planner)
        except Exception as e:
            cause: BaseException | None = e
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or e from e


class Writer:
    """Makes snapshots durable in one directory."""

    def __init__(self, directory: Path, keep: int, ranks: Ranks, fence: Fence) -> None:
        """Nothing is written yet."""
        self._directory, self._keep, self._ranks, self._fence = directory, keep, ranks, fence

    def write(self, snapshot: Snapshot) -> Path:
        """Write, verify and commit; all ranks return the path or all raise. What was not committed is removed."""
        faults = [f"rank {r}: {fault}" for r, fault in enumerate(self._ranks.gather(snapshot.fault)) if fault]
        if faults:
            raise CheckpointError(f"step {snapshot.step} was not saved: {faults[0]}")
        path = self._directory / self._ranks.from_first(lambda: self._make_directory(snapshot.step))
        try:
            try:
                mine: dict[str, tuple[int, int]] | str = self._write_own(path, snapshot)
            except CheckpointException as e:  # derives from BaseException
                mine = "; ".join(f"rank {r}: {type(x[0]).__name__}: {x[0]}" for r, x in e.failures.items())
            except Exception as e:  # whatever storage does: every rank has to learn of it
                mine = f"rank {self._ranks.rank}: {type(e).__name__}: {e}"
            files: dict[str, tuple[int, int]] = {}
            for theirs in self._ranks.gather(mine):
                if isinstance(theirs, str):
                    raise CheckpointError(f"step {snapshot.step} was not saved to {path}: {theirs}")
                files.update(theirs)
            self._ranks.from_first(lambda: self._commit(path, snapshot, files))
        except BaseException:
            self._abandon(path)
            raise
        if self._ranks.rank == 0:
            self._prune(path)
        return path

    def _make_directory(self, step: int) -> str:
        self._fence.claim()
        name = catalogue.fresh_name(step, self._fence.token.generation)
        try:
            (self._directory / name).mkdir()
            sync_directory(self._directory)
        except OSError as e:
            raise CheckpointError(f"step {step} was not saved: rank 0 cannot make {self._directory / name}: {e.strerror}") from e
        return name

    def _write_own(self, path: Path, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
        rank = self._ranks.rank
        write_durably(path / values_file(rank), json.dumps(snapshot.values).encode())
        # More than one thread per rank would lose a write error of the second one (and still write .metadata).
        writer = _PlainWriter(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        with without_lone_process_warning():
            save(snapshot.tensors, storage_writer=writer, process_group=self._ranks.group)
        own = [values_file(rank), *(p.name for p in path.glob(f"__{rank}_*"))] + ([".metadata"] if rank == 0 else [])
        return {name: checksum(path / name) for name in own}

    def _commit(self, path: Path, snapshot: Snapshot, files: dict[str, tuple[int, int]]) -> None:
        for name, (size, _) in files.items():
            found = (path / name).stat().st_size if (path / name).exists() else None
            if found != size:
                raise CheckpointError(
                    f"step {snapshot.step} was not saved: rank 0 sees {found} bytes of the {size} in {path / name}; "
                    "all nodes have to share the checkpoint directory"
                )
        for index, info in (read_metadata(path).storage_data or {}).items():
            if info.relative_path not in files or info.offset + info.length > files[info.relative_path][0]:
                raise CheckpointError(f"step {snapshot.step} was not saved: {index.fqn} is not in {path / info.relative_path}")
        manifest = Manifest(
            step=snapshot.step,
            world_size=self._ranks.size,
            started=self._fence.token.started,
            generation=self._fence.token.generation,
            torch=torch.__version__,
            entries=tuple(snapshot.values),
            files=files,
        )
        sync_directory(path)
        # Between this look and the rename lies less than a millisecond: that is what the fence leaves open.
        self._fence.check()
        write_durably(path / MANIFEST_FILE, manifest.to_bytes())

    def _abandon(self, path: Path) -> None:
        if self._ranks.rank == 0 and not (path / MANIFEST_FILE).exists():
            # The save's own failure is what the user has to read; the next commit clears leftovers.
            with contextlib.suppress(OSError):
                catalogue.remove(path)

    def _prune(self, path: Path) -> None:
        try:
            self._fence.check()  # what a newer attempt is writing at this moment is not a leftover
            catalogue.prune(self._directory, self._keep, path)
        except (OSError, CheckpointError) as e:
            print(f"goodrun: old checkpoints in {os.fspath(self._directory)} were not removed: {e}", file=sys.stderr)
