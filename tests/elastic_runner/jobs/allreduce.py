"""As many steps as the first argument says, each with an all_reduce and an optimizer step."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(int(sys.argv[1])):
    weight.grad = torch.ones(4)
    dist.all_reduce(weight.grad)
    optimizer.step()
    time.sleep(float(os.environ.get("TEST_PAUSE", "0.02")))
dist.destroy_process_group()
