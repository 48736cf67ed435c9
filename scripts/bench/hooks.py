"""The job that times goodrun's hooks: the same steps with and without them, by turns, in one process.

A step is a batch from a DataLoader, forward, backward, the optimizer, and a fixed amount of work. Its length is the main thread's CPU time:
what peers and neighbours on the machine do is not in it. `hooks.py PAIRS PRODUCTS FILE`: rank 0 writes each pair's difference in µs.
"""

import json
import random
import sys
import time

import torch
import torch.distributed as dist

from goodrun import progress

pairs, products, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
torch.manual_seed(0)
order = random.Random(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
batches = iter(torch.utils.data.DataLoader(torch.randn(2 * pairs + 20, 64), batch_size=1))
work, page = torch.randn(256, 256), progress.page()


def step(hooked: bool) -> float:
    progress._page = page if hooked else None
    begin = time.thread_time()
    optimizer.zero_grad()
    model(next(batches)).sum().backward()
    optimizer.step()
    for _ in range(products):
        work @ work
    return time.thread_time() - begin


for _ in range(20):
    step(True)
begin, differences = time.monotonic(), []
for _ in range(pairs):
    first = order.random() < 0.5
    took = {hooked: step(hooked) for hooked in (first, not first)}
    differences.append(1e6 * (took[True] - took[False]))
progress._page = page
if dist.get_rank() == 0:
    with open(out, "w") as f:
        json.dump({"step_s": (time.monotonic() - begin) / (2 * pairs), "differences_us": differences}, f)
dist.destroy_process_group()
