"""Volumes that are mounted, and other mounts of object stores: sequential writes and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goodrun.checkpoint import CheckpointDamaged, places
from goodrun.checkpoint.catalogue import fresh_name, prune
from goodrun.checkpoint.drain import Drain, Limiter, Part, Work
from goodrun.checkpoint.fence import Fence, Token
from goodrun.checkpoint.manifest import MANIFEST_FILE, first_fault, read_manifest
from goodrun.checkpoint.mount import Mount, sequential_only
from goodrun.checkpoint.retention import Keep
from goodrun.checkpoint.vouching import Word

from .mounted import Refusing

TOKEN = Token(1, 0)


def work(root: Path, step: int, disk: Any) -> Work:
    """A snapshot of one rank, one tensor of 20 MiB."""
    shard = memoryview(bytearray([step]) * (20 << 20))
    name = fresh_name(step, TOKEN, step)
    parts = {0: Part(0, shard, ((0, len(shard), ()),), b"{}", Word())}
    return Work(root, name, step, 1, parts, True, Fence(root, TOKEN, disk=disk), Keep(last=1), index=b"{}")


def test_a_save_takes_sequential_writes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mount that refuses everything else, saves are committed and pruned, and the fence holds."""
    mount = Refusing()
    monkeypatch.setattr(places, "sequential_only", lambda path: True)
    monkeypatch.setattr(places, "Mount", lambda through: mount)
    drain = Drain(mount, Limiter())
    for step in (1, 2):
        one = work(tmp_path, step, None)
        path = drain.write(one, lambda: None)
        drain.prune(one)
        assert first_fault(path, read_manifest(path).files.items()) is None
    assert [p.name for p in tmp_path.glob("step-*")] == [fresh_name(2, TOKEN, 2)]
    assert mount.calls.count("write") > 10
    assert "rename" not in mount.calls


def test_half_a_commit_mark_is_none(tmp_path: Path) -> None:
    """Without a rename the mark may be cut at any byte: it then counts as damaged, never as whole."""
    path = Drain(Mount(), Limiter()).write(work(tmp_path, 1, None), lambda: None)
    assert isinstance(path, Path)
    whole = (path / MANIFEST_FILE).read_bytes()
    for length in range(len(whole)):
        (path / MANIFEST_FILE).write_bytes(whole[:length])
        with pytest.raises(CheckpointDamaged):
            read_manifest(path)
    assert prune(tmp_path, Keep(last=1), tmp_path, Mount()) == [], "what may be all that is left of something stays"


@pytest.mark.parametrize(
    ("path", "is_one"),
    [("/Volumes/a/b/c/run", True), ("/mnt/bucket/run", True), ("/mnt/bucketeer", False), ("/mnt/ntfs/run", False), ("/home/x", False)],
)
def test_which_places_are_mounts(tmp_path: Path, path: str, is_one: bool) -> None:
    """A volume's path, and whatever lies on a file system in user space."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "40 21 0:40 / /mnt/bucket rw,nosuid shared:9 - fuse.gcsfuse bucket rw\n"
        "41 21 0:41 / /mnt/ntfs rw - fuseblk /dev/sdb1 rw\n"
    )
    assert sequential_only(Path(path), mounts) is is_one
