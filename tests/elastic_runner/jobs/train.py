"""A tiny exact DDP job: logs the sample ids of every step it finishes, checkpoints, and leaves the hash of its final weights.

Arguments: steps, then words: `sleep:RANK@STEP` sleeps for ever (first generation), `eval:RANK@STEP=SECONDS` computes that long,
`compile` takes long before this life's first step, `barrier:RANK` waits for its peers in that rank alone when all is done, `workers` has
its loader use a worker process, `replicas` has the ranks' models compared, `auto` saves when it costs least, `one` keeps
one checkpoint.
"""

import hashlib
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from goodrun.checkpoint import Checkpointer, ElasticSampler

steps, words = int(sys.argv[1]), sys.argv[2:]
here = Path(os.environ["TEST_DIR"])
dist.init_process_group("gloo")
rank, world, generation = dist.get_rank(), dist.get_world_size(), int(os.environ["GOODRUN_GENERATION"])
life = os.environ.get("TEST_LIFE", "0")
torch.manual_seed(0)
data = torch.arange(96, dtype=torch.float32).unsqueeze(1) / 96
target = torch.sin(data * 7)
inner = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = ElasticSampler(len(data), global_batch=12, seed=3)
loader = DataLoader(range(len(data)), batch_sampler=sampler, generator=torch.Generator(), num_workers=int("workers" in words))
model(data[:1]).sum().backward()  # DDP orders its buckets anew after the first backward
optimizer.zero_grad()
place = os.environ.get("TEST_CHECKPOINTS", here / "checkpoints")
busy, watched = os.environ.get("TEST_WHEN_BUSY", "wait"), {"model": model, "optimizer": optimizer, "sampler": sampler}
every, keep = "auto" if "auto" in words else 5, 1 if "one" in words else 3
checkpoints = Checkpointer(place, every=every, keep=keep, when_busy=busy, check_replicas="replicas" in words, **watched)
step = checkpoints.restore()
log = open(here / f"samples.l{life}.g{generation:03d}.r{rank}", "a")  # noqa: SIM115


def act(word: str) -> None:
    found = re.fullmatch(r"(\w+):(\d+)@(\d+)(?:=([\d.]+))?", word)
    if not found:
        return
    kind, who, at, seconds = found.groups()
    if int(who) != rank or int(at) != step or generation:
        return
    if kind == "sleep":
        (here / "asleep").write_text(str(time.monotonic()))
        time.sleep(1000)
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))


if "compile" in words:
    (here / f"compiles.l{life}.r{rank}").touch()
    time.sleep(60)
while step < steps:
    for ids in loader:
        weight = sampler.weight
        for word in words:
            if ":" in word:
                act(word)
        loss = torch.nn.functional.mse_loss(model(data[ids]), target[ids])
        optimizer.zero_grad()
        (loss * weight).backward()
        optimizer.step()
        step += 1
        used = ids.tolist() if weight else []
        print(step, world, *used, file=log, flush=True)
        with open(here / f"times.g{generation:03d}.r{rank}", "a") as times:
            print(time.monotonic(), step, file=times)
        time.sleep(float(os.environ.get("TEST_PAUSE", "0.02")))
        checkpoints.step(step)
        if step == steps:
            break
checkpoints.close()
state = b"".join(p.detach().numpy().tobytes() for p in inner.parameters())
(here / f"final.l{life}.r{rank}").write_text(hashlib.sha256(state).hexdigest())
with torch.no_grad():
    (here / f"loss.l{life}").write_text(repr(torch.nn.functional.mse_loss(inner(data), target).item())) if rank == 0 else None
if f"barrier:{rank}" in words:
    dist.barrier()
if not any(word.startswith("barrier") for word in words):
    dist.destroy_process_group()
