"""Ten steps of a model; in an attempt after the first, rank 0 leaves a process of a session of its own behind."""

import os
import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
if os.environ["GOODRUN_GENERATION"] != "0" and dist.get_rank() == 0:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
