"""Steps for ever, each an all_reduce, and writes down when each was made and at which world size: for any launcher."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
with open(os.path.join(os.environ["TEST_DIR"], "paced"), "a") as log:
    while True:
        dist.all_reduce(torch.ones(4))
        if rank == 0:
            print(time.monotonic(), dist.get_world_size(), file=log, flush=True)
        time.sleep(0.05)
