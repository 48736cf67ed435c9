"""What a checkpoint costs: stall, time to durable, slow-down of the steps beside it, restore; ours and torch's in turn, in one run.

Every figure is a ratio to one memory copy of the state that the rank holds, taken right before it; the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from goodrun.checkpoint import Checkpointer, Keep
from goodrun.checkpoint.link import keeper_command

WIDTH = 512
LAYER_BYTES = 12 * WIDTH * WIDTH * 4 * 3  # weights and two moments


class Rank:
    """One rank of the measured job: a state as DDP has it (the same on every rank) or FSDP2 (a shard on each), and a step to train."""

    def __init__(self, mib: int, folder: Path, *, sharded: bool) -> None:
        """Build about `mib` MiB of weights and Adam moments, in all where they are `sharded`."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.folder = folder
        torch.manual_seed(0)
        layers = max(1, (mib << 20) // LAYER_BYTES)
        self.model = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True) for _ in range(layers))
        if sharded:
            for layer in self.model:
                fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tensors = [t.to_local() if isinstance(t, DTensor) else t for t in _tensors(self.state())]
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.copy = [torch.zeros_like(t) for t in self.tensors]
        self.left, self.right = torch.rand(600, 600), torch.rand(600, 600)
        self.sum = torch.zeros(1)
        self.after_step: Callable[[], None] = lambda: None

    def state(self, *, whole: bool = False) -> dict[str, Any]:
        """As dcp is given it; or, `whole`, as one file has it: gathered on rank 0 where it is sharded."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True) if whole else None
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def memcpy(self) -> float:
        """Seconds for one copy of what this rank holds into memory that is there already, both ranks at once."""
        dist.barrier()
        begin = time.perf_counter()
        for into, out in zip(self.copy, self.tensors, strict=True):
            into.copy_(out)
        return time.perf_counter() - begin

    def train(self, steps: int) -> list[float]:
        """Seconds of each of some steps that compute and then wait for each other."""
        took = []
        for _ in range(steps):
            begin = time.perf_counter()
            for _ in range(4):
                torch.mm(self.left, self.right)
            dist.all_reduce(self.sum)
            self.after_step()
            took.append(time.perf_counter() - begin)
        return took


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [t for part in parts for t in _tensors(part)]


Way = Callable[[int], Callable[[], None]]
"""Starts the save of a step (that is the stall) and returns what waits until it is durable."""


def ours(r: Rank) -> tuple[Way, Checkpointer]:
    """goodrun's Checkpointer."""
    checkpoints = Checkpointer(r.folder / "ours", every=1 << 60, keep=Keep(last=1), model=r.model, optimizer=r.optimizer)
    r.after_step = lambda: checkpoints.step(1)  # as a training loop does: the slots are made beside the steps

    def save(step: int) -> Callable[[], None]:
        pending = checkpoints.save(step)
        return pending.result

    return save, checkpoints


def rank0(r: Rank) -> Way:
    """torch.save by rank 0, fsynced."""

    def save(step: int) -> Callable[[], None]:
        state = r.state(whole=True)
        if r.rank == 0:
            with open(r.folder / "rank0.pt", "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
        dist.barrier()
        return lambda: None

    return save


def dcp_save(r: Rank) -> Way:
    """dcp.save."""

    def save(step: int) -> Callable[[], None]:
        dcp.save(r.state(), storage_writer=FileSystemWriter(r.folder / "dcp", overwrite=True))
        return lambda: None

    return save


def dcp_async(r: Rank, kind: str) -> Way:
    """dcp.async_save as well as it can be tuned: one stager kept; for the process kind staged through shared memory."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
    process = kind == "process"
    options = StagingOptions(use_pinned_memory=False, use_shared_memory=process, use_async_staging=False, use_non_blocking_copy=False)
    stager = DefaultStager(options)
    which = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD

    def save(step: int) -> Callable[[], None]:
        writer = FileSystemWriter(r.folder / f"async-{kind}", overwrite=True)
        future: Any = dcp.async_save(
            r.state(), storage_writer=writer, process_group=group, async_checkpointer_type=which, async_stager=stager
        )
        done = getattr(future, "upload_completion", future)
        return lambda: done.result()

    return save


@contextmanager
def _clock(into: list[float], copy: float) -> Any:
    begin = time.perf_counter()
    yield
    into.append((time.perf_counter() - begin) / copy)


def measure(r: Rank, ways: dict[str, Way], rounds: int) -> dict[str, Any]:
    """All ways in turn, round after round; the first round is told apart."""
    copies: list[float] = []
    stall: dict[str, list[float]] = {w: [] for w in ways}
    durable: dict[str, list[float]] = {w: [] for w in ways}
    lost: dict[str, list[float]] = {w: [] for w in ways}
    step = 1
    for _ in range(rounds + 1):
        for name, way in ways.items():
            copy = statistics.median(r.memcpy() for _ in range(3))  # beside each save: what else the machine does changes by the minute
            copies.append(copy)
            quiet = statistics.median(r.train(6))
            step += 1
            dist.barrier()
            begin = time.perf_counter()
            wait = way(step)
            beside = [time.perf_counter() - begin]
            stall[name].append(beside[0] / copy)
            pending = True
            while pending:  # steps beside the save until it is durable on every rank
                took = r.train(1)
                beside.append(max(0.0, took[0] - quiet))
                done = torch.tensor([1.0 if _done(wait) else 0.0])
                dist.all_reduce(done, op=dist.ReduceOp.MIN)
                pending = done.item() == 0.0
            wait()
            durable[name].append((time.perf_counter() - begin) / copy)
            lost[name].append(sum(beside) / copy)
    ref = statistics.median(copies)
    return {
        "bytes": r.nbytes,
        "memcpy_s": ref,
        "ways": {
            name: {
                "first": stall[name][0],
                "stall": statistics.median(stall[name][1:]),
                "stall_worst": max(stall[name][1:]),
                "durable": statistics.median(durable[name][1:]),
                "lost": statistics.median(lost[name][1:]),
            }
            for name in ways
        },
    }


def _done(wait: Callable[[], None]) -> bool:
    owner = getattr(wait, "__self__", None)
    if owner is not None:
        return bool(owner.done)
    cells = [c.cell_contents for c in (wait.__closure__ or ())]
    return all(c.done() for c in cells if hasattr(c, "done"))


def restores(r: Rank, rounds: int) -> dict[str, float]:
    """Restores in turn: ours out of memory and from files, and dcp.load of what dcp.save wrote; into tensors that exist."""
    took: dict[str, list[float]] = {"ours, memory": [], "ours, files": [], "dcp.load": []}
    for _ in range(rounds):
        for name, times in took.items():
            copy = statistics.median(r.memcpy() for _ in range(3))
            dist.barrier()
            if name == "dcp.load":
                with _clock(times, copy):
                    state = r.state()
                    dcp.load(state, storage_reader=FileSystemReader(r.folder / "dcp"))
                continue
            keeper = os.environ.pop("GOODRUN_KEEPER") if name == "ours, files" else None  # without its memory: files only
            again = Checkpointer(r.folder / "ours", model=r.model, optimizer=r.optimizer)
            dist.barrier()
            with _clock(times, copy):
                assert again.restore() > 0
            if keeper is not None:
                os.environ["GOODRUN_KEEPER"] = keeper
            again.close()
    return {name: statistics.median(times[1:]) for name, times in took.items()}


def work(args: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    r = Rank(args.mib, Path(args.folder), sharded=args.fsdp)
    ways: dict[str, Way] = {}
    ways["goodrun"], checkpoints = ours(r)
    ways |= {"dcp.save": dcp_save(r), "async thread": dcp_async(r, "thread"), "torch.save": rank0(r)}
    if args.process:
        ways["async process"] = dcp_async(r, "process")
    r.train(150)  # as in a job, the first save comes some seconds after the first step
    found = measure(r, ways, args.rounds)
    mine = torch.tensor([float(sum(f.stat().st_size for f in (r.folder / "ours").glob(f"step-*/__{r.rank}_0.distcp")))])
    sizes = [torch.zeros(1) for _ in range(r.world)]
    dist.all_gather(sizes, mine)
    found["bytes_per_rank"] = [int(s.item()) for s in sizes]
    found["restore"] = restores(r, args.rounds + 1)
    if r.rank == 0:
        Path(args.folder, "result.json").write_text(json.dumps(found))
    checkpoints.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and a keeper, as a launcher would; print one table for each number of ranks."""
    parser = argparse.ArgumentParser(prog="bench_checkpoint", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on", type=Path, help="folder to write to (default: a temporary one)")
    parser.add_argument("--fsdp", action="store_true", help="a state that FSDP2 has sharded, in place of DDP's replicas")
    parser.add_argument("--process", action="store_true", help="also dcp.async_save in a process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        work(args)
        return
    results = {}
    for world in args.ranks:
        folder = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.on)
        try:
            results[world] = _run(args, world, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _show("FSDP2" if args.fsdp else "DDP", world, results[world])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def _run(args: argparse.Namespace, world: int, folder: str) -> dict[str, Any]:
    ours, life = os.pipe()
    name = f"bench-{os.getpid()}-{world}"
    command = keeper_command(name, "--parent", str(ours))
    keeper = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=[ours], start_new_session=True)
    os.close(ours)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(world):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"OMP_NUM_THREADS": "1", "GOODRUN_KEEPER": name, "GOODRUN_RUN_STARTED": "1", "GOODRUN_GENERATION": "0"}
        words = ["--folder", folder, "--mib", str(args.mib), "--rounds", str(args.rounds)]
        words += [f"--{flag}" for flag in ("process", "fsdp") if getattr(args, flag)]
        ranks.append(subprocess.Popen([sys.executable, "-W", "ignore", __file__, *words], env=env))
    try:
        if any([r.wait(1800) for r in ranks]):
            sys.exit("a rank of the measurement failed")
    finally:
        for r in ranks:
            r.kill()
        os.close(life)
        keeper.wait(60)
    found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return found


def _show(kind: str, world: int, found: dict[str, Any]) -> None:
    mib = found["bytes"] / (1 << 20)
    copy = f"one memory copy of it takes {found['memcpy_s'] * 1e3:.1f} ms; all else in copies"
    print(f"\n{kind}, {world} ranks, {mib:.0f} MiB of state on each; {copy}")
    print(f"{'':16}{'first':>8}{'stall':>8}{'worst':>8}{'durable':>9}{'lost':>8}")
    for name, w in found["ways"].items():
        print(f"{name:16}{w['first']:8.2f}{w['stall']:8.2f}{w['stall_worst']:8.2f}{w['durable']:9.2f}{w['lost']:8.2f}")
    print("restore: " + ", ".join(f"{name} {value:.2f}" for name, value in found["restore"].items()))
    print(f"bytes written per rank: {found['bytes_per_rank']}")


if __name__ == "__main__":
    main()
