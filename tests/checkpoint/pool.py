"""Six ranks that save and load made-up states together, one case after the other; cases come as lines of JSON on stdin."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from goodrun.checkpoint import Checkpointer, ranks
from goodrun.checkpoint.ranks import Ranks, node_name
from goodrun.checkpoint.remote.bucket import bucket_of

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Some(Ranks):
    """The first `size` ranks as if they were all."""

    size_now = WORLD
    groups: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        """Groups are made once: making one takes all ranks."""
        self.group, self.rank, self.size = self.groups[self.size_now], RANK, self.size_now
        self.number, self.local = 0, tuple(range(self.size_now))
        node_name()


class Bag:
    """State as a plain dict of tensors, read into place."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        """The tensors are the bag's own."""
        self.state = state

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """They are in place already, or else it is an error."""
        assert all(state[name] is tensor for name, tensor in self.state.items())


def whole(tensor: list[Any], salt: int) -> torch.Tensor:
    """The values that a tensor of the case has, on every rank alike."""
    size, dtype = tensor[0], getattr(torch, tensor[1])
    count = int(torch.Size(size).numel())
    return ((torch.arange(count) * 7 + salt) % 251).to(dtype).reshape(size)


def laid(how: int | None, value: torch.Tensor, world: int) -> Shard | Replicate | None:
    """Whole on every rank (None), sharded by a dimension that the tensor has, or replicated."""
    if how is None or world == 1 or how >= value.ndim:
        return None
    return Replicate() if how < 0 else Shard(how)


def part(value: torch.Tensor, mesh: DeviceMesh, placement: Shard | Replicate) -> torch.Tensor:
    """What this rank has of a sharded tensor, cut without a message: gloo cannot carry every type."""
    size, offset = compute_local_shape_and_global_offset(value.shape, mesh, [placement])
    for d in range(value.ndim):
        value = value.narrow(d, offset[d] if size[d] else 0, size[d])
    return value.clone()


def made(case: dict[str, Any], world: int, meshes: dict[int, DeviceMesh], *, zero: bool) -> dict[str, torch.Tensor]:
    """The state of the case as this rank of `world` holds it."""
    found = {}
    for number, tensor in enumerate(case["tensors"]):
        value = whole(tensor, number)
        if zero:
            value = torch.zeros_like(value)
        placement = laid(tensor[2], value, world)
        found[f"t{number}"] = value.t().contiguous().t() if value.ndim == 2 else value
        if placement is not None:
            found[f"t{number}"] = DTensor.from_local(
                part(value, meshes[world], placement), meshes[world], [placement], run_check=False, shape=value.shape, stride=value.stride()
            )
    return found


def run(case: dict[str, Any], meshes: dict[int, DeviceMesh]) -> str:
    """Save at one size, load at another; what is wrong, or nothing."""
    before, after = case["worlds"]
    if any(os.environ.get(name) != value for name, value in case["environ"].items()):
        os.environ.update(case["environ"])
        bucket_of.cache_clear()  # another test's server
    if before > RANK:
        Some.size_now = before
        with Checkpointer(case["folder"], bag=Bag(made(case, before, meshes, zero=False))) as checkpointer:
            checkpointer.save(1)
    dist.barrier()
    wrong = ""
    if after > RANK:
        Some.size_now = after
        state = made(case, after, meshes, zero=True)
        checkpointer = Checkpointer(case["folder"], bag=Bag(state))
        if checkpointer.restore() != 1:
            wrong = "nothing was restored"
        checkpointer.close()
        for number, tensor in enumerate(case["tensors"]):
            got = state[f"t{number}"]
            want = whole(tensor, number)
            if isinstance(got, DTensor):
                want = part(want, meshes[after], got.placements[0])  # type: ignore[arg-type]
                got = got.to_local()
            got, want = (t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (got, want))
            if not torch.equal(got, want):
                wrong = f"rank {RANK}: t{number} of {case} is {got} and not {want}"
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, wrong)
    return next((w for w in everyone if w), "")


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=WORLD)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(2, WORLD + 1)}
    Some.groups = {n: mesh.get_group() for n, mesh in meshes.items() if n > RANK} | {1: None}
    ranks.Ranks.check = lambda self: None  # type: ignore[method-assign]
    sys.modules["goodrun.checkpoint.store"].Ranks = Some  # type: ignore[attr-defined]
    while True:
        line: list[Any] = [sys.stdin.readline() if RANK == 0 else None]
        dist.broadcast_object_list(line, src=0)
        if not line[0]:
            break
        wrong = run(json.loads(line[0]), meshes)
        if RANK == 0:
            print(wrong, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(os.environ["STORE"]).parent.mkdir(parents=True, exist_ok=True)
    main()
