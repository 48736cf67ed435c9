"""Adds 1 to a weight in every step, on a cosine schedule with warm-up: arguments are the steps and how often to save."""

import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from goodrun.checkpoint import Checkpointer

steps, every = int(sys.argv[1]), int(sys.argv[2])
here = Path(os.environ["TEST_DIR"])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 5) * (1 + math.cos(math.pi * n / 40)) / 2)
checkpoints = Checkpointer(here / "checkpoints", every=every, model=model, optimizer=optimizer, rate=rate)
step = checkpoints.restore()
log = open(here / f"steps.r{rank}", "a")  # noqa: SIM115
while step < steps:
    model.weight.grad = torch.tensor(-1.0 / optimizer.param_groups[0]["lr"])
    dist.all_reduce(model.weight.grad, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
    model.weight.grad /= dist.get_world_size()
    optimizer.step()
    step += 1
    log.write(f"{step} {optimizer.param_groups[0]['lr']:.12f} {model.weight.item():.6f}\n")
    log.flush()
    rate.step()
    checkpoints.step(step)
checkpoints.close()
dist.destroy_process_group()
