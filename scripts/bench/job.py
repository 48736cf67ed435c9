"""The job that bench_recovery times: small, DDP over gloo, a fixed amount of work a step; every step writes when it ended.

A line in steps.<rank>: pid, step, seconds of the machine's monotonic clock. Plain PyTorch: no launcher is favoured.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

steps, products, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
x, work = torch.randn(16, 64), torch.randn(256, 256)
with open(os.path.join(where, f"steps.{rank}"), "a", buffering=1) as out:
    for step in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        for _ in range(products):
            work @ work
        out.write(f"{os.getpid()} {step} {time.monotonic()}\n")
dist.destroy_process_group()
