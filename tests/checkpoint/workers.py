"""What one rank of a test's job does; started as `python workers.py SCENARIO ROOT …` with RANK, WORLD_SIZE and STORE set."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from goodrun.checkpoint import Checkpointer, CheckpointError, DictCheckpoints, ElasticSampler, PendingSave, SnapshotKept
from goodrun.checkpoint.codec import Place

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def digest(*tensors: torch.Tensor) -> str:
    """One word for the bits of these tensors."""
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in tensors)
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in whole)).hexdigest()


def tell(root: Path, name: str, what: object) -> None:
    """Leave a result of this rank for the test."""
    (root / f"{name}.r{RANK}").write_text(json.dumps(what))


def digested(root: Path, name: str, checkpointed: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Leave the bits of weights and moments."""
    model, optimizer = checkpointed
    tell(root, name, digest(*model.parameters(), *(v for p in model.parameters() for _, v in sorted(optimizer.state[p].items()))))


def train(root: Path, name: str, until: str, dropout: str, end: str = "") -> None:
    """Train from whatever is in ROOT/ckpt to step UNTIL, saving after every step; leave ids, weights and the next random numbers.

    END is `killed` where the ranks are to die of SIGKILL right after that step's snapshot.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(20), torch.randn(20, 6))
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(float(dropout)), nn.Linear(8, 1))
    torch.manual_seed(100 + RANK)
    random.seed(100 + RANK)
    model = DistributedDataParallel(module) if dist.is_initialized() else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    sampler = ElasticSampler(data, global_batch=8)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    used: list[int] = []
    rates: list[float] = []
    with Checkpointer(root / "ckpt", every=1, model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler) as checkpointer:
        step = start = checkpointer.restore()
        while step < int(until):
            for ids, x in loader:
                if sampler.weight:
                    used += ids.tolist()
                rates += scheduler.get_last_lr()
                optimizer.zero_grad()
                (model(x).pow(2).mean() * sampler.weight).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                checkpointer.step(step)
                if step == int(until):
                    break
        if end:
            tell(root, name, {"start": start, "used": used, "rates": rates})
            os.kill(os.getpid(), signal.SIGKILL)
    moments = [v for p in module.parameters() for _, v in sorted(optimizer.state[p].items())]
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    state = digest(weights, *moments, torch.rand(3), torch.tensor([random.random(), scheduler.get_last_lr()[0]]))
    tell(root, name, {"start": start, "used": used, "rates": rates, "state": state, "weights": weights.tolist()})


def own(root: Path, phase: str) -> None:
    """Every rank has its own cursor and random states; the weights are everybody's."""
    torch.manual_seed(7 + RANK)
    random.seed(7 + RANK)
    weights = torch.full((1 << 16,), 3.0)
    state: dict[str, Any] = {"weights": weights, "rng": torch.get_rng_state(), "py": random.getstate(), "data": {"cursor": 10 + RANK}}
    wanted = [digest(state["rng"]), repr(state["py"]), state["data"]]
    if phase == "save":
        DictCheckpoints(root / "ckpt").save(state, 4).result()
    else:
        torch.rand(5)
        state.update(rng=torch.get_rng_state(), py=(), data={"cursor": -1})
        weights.zero_()
        assert DictCheckpoints(root / "ckpt").load(state) == 4
        assert state["weights"] is weights
        assert weights.eq(3.0).all()
    tell(root, phase, wanted if phase == "save" else [digest(state["rng"]), repr(state["py"]), state["data"]])


def there_and_back(root: Path, phase: str, model: nn.Sequential) -> None:
    """Save a model and its moments after two steps, or load them into these."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(root / "ckpt", model=model, optimizer=optimizer)
    if phase == "save":
        for _ in range(2):
            model(torch.ones(2, model[0].in_features)).sum().backward()
            optimizer.step()
        checkpointer.save(2)
        checkpointer.close()
    else:
        assert checkpointer.restore() == 2
    digested(root, phase, (model, optimizer))


def sharded(root: Path, phase: str) -> None:
    """FSDP2 where there are several ranks, a bare module where there is one."""
    torch.manual_seed(1 if phase == "save" else 2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if WORLD > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    there_and_back(root, phase, model)


def laid(model: nn.Module, how: str) -> None:
    """Spread a model over the ranks: replicated shards (HSDP), shards of tensor-parallel parts, plain shards (FSDP2), or not at all."""
    if how == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard")))
    elif how == "tp":
        mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))


def meshed(root: Path, phase: str, how: str) -> None:
    """Save or load a model and its moments that lie on the ranks in this way."""
    torch.manual_seed(1 if phase == "save" else 2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3))
    laid(model, how)
    there_and_back(root, phase, model)


def full(root: Path, look: str) -> None:
    """The disk takes 1 MiB per file and the state has 4."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    checkpoints = DictCheckpoints(root / "ckpt")
    pending = checkpoints.save({"w": torch.rand(1 << 20)}, 7)
    if look == "yes":
        try:
            pending.result()
        except CheckpointError as e:
            tell(root, "full", str(e))


def killed(root: Path, phase: str) -> None:
    """Rank 1 dies while step 2 is being written."""
    state: dict[str, Any] = {"w": torch.zeros(4 << 20), "step": 0}
    checkpoints = DictCheckpoints(root / "ckpt")
    if phase == "load":
        step = checkpoints.load(state)
        tell(root, "killed", [step, state["step"], state["w"].unique().tolist()])
        return
    for step in (1, 2):
        state["w"].fill_(float(step))
        state["step"] = step
        pending = checkpoints.save(state, step)
        if step == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pending.result()


def dies(root: Path, step: str, half: str = "") -> None:
    """All ranks die right after the snapshot of STEP; or rank HALF alone, before it has copied its part."""
    checkpoints = DictCheckpoints(root / "ckpt")
    state = {"w": torch.arange(4 << 20)}
    if half:
        checkpoints._store.prepare(lambda: state, lambda name, tensor: Place.SHARED)
        if int(half) == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(state, int(step))
    if not half:
        os.kill(os.getpid(), signal.SIGKILL)


def twice(root: Path) -> None:
    """A second checkpointer of the same directory, made while the first is still there, and the first one gone before it saves."""
    state = {"w": torch.arange(1 << 12)}
    first = DictCheckpoints(root / "ckpt")
    first.save(state, 1).result(30)
    second = DictCheckpoints(root / "ckpt")
    second.save(state, 2).result(30)
    first.close()
    for step in (3, 4):
        second.save(state, step).result(30)


def nodes(root: Path, one: str, other: str) -> None:
    """Each rank has a keeper of its own, as ranks of different nodes have."""
    os.environ["GOODRUN_KEEPER"] = (one, other)[RANK]
    checkpoints = DictCheckpoints(root / "ckpt")
    state: dict[str, Any] = {"w": torch.arange(1 << 16), "who": RANK}
    for step in (1, 2):
        checkpoints.save(state, step).result()
    state["w"].zero_()
    state["who"] = -1
    assert checkpoints.load(state) == 2
    tell(root, "nodes", [int(state["w"].sum()), state["who"]])
    checkpoints.close()


def parted(root: Path, url: str, one: str, other: str) -> None:
    """Ranks of two nodes; storage is gone for good after the first step."""
    os.environ["GOODRUN_KEEPER"] = (one, other)[RANK]
    checkpoints = DictCheckpoints(url)
    state: dict[str, Any] = {"w": torch.arange(1 << 16), "who": RANK}
    checkpoints.save(state, 1).result()
    tell(root, "ready", True)
    while not (root / "gone").exists():
        time.sleep(0.01)
    checkpoints.save(state, 2)
    try:
        checkpoints.wait()
    except SnapshotKept as e:
        tell(root, "parted", str(e))
    checkpoints.close()


def refused(root: Path, url: str) -> None:
    """Storage does not let the job in: it finds out at the first look."""
    DictCheckpoints(url).save({"w": torch.rand(16)}, 7).result()


def hasty(root: Path) -> None:
    """The script takes the process group away from a save that is being written."""
    DictCheckpoints(root / "ckpt").save({"w": torch.rand(4 << 20)}, 7)


def matrix(root: Path, place: str, then: str) -> None:
    """DDP: restore, save one step that becomes durable, then the next with the fault armed; THEN is what this job does about that one."""
    tell(root, "pid", os.getpid())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(place, keep=1, model=model, optimizer=optimizer)
    start = checkpointer.restore()
    tell(root, "restored", start)
    if start:
        digested(root, f"restored-{start}", (model, optimizer))

    def save(step: int) -> PendingSave:
        optimizer.zero_grad()
        model(torch.full((2, 96), float(step + RANK))).sum().backward()
        optimizer.step()
        digested(root, f"saved-{step}", (model, optimizer))
        return checkpointer.save(step)

    save(start + 1).result(60)
    if then != "leave":
        dist.barrier()
        if RANK == 0:
            (root / "armed").touch()
        dist.barrier()
        pending = save(start + 2)
        if then == "die":  # all ranks are gone, one instruction after the snapshot
            os.kill(os.getpid(), signal.SIGKILL)
        elif then == "give-up":
            with suppress(CheckpointError):  # the fault may come after the commit
                checkpointer.wait()
            pending.fate.seen = True
        else:
            pending.result(60)
    checkpointer.close()
    tell(root, "left", then)


def main() -> None:
    """Join the others and play the part."""
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=WORLD)
    parts = (train, own, sharded, full, killed, hasty, dies, nodes, parted, refused, matrix, twice, meshed)
    scenario = {part.__name__: part for part in parts}[sys.argv[1]]
    scenario(Path(sys.argv[2]), *sys.argv[3:])  # type: ignore[operator]
    if WORLD > 1 and sys.argv[1] != "full":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
