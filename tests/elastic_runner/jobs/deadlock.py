"""Ranks 0 and 2 wait for a word from each other for ever, in C++, with a handler for SIGTERM; rank 1 dies of that in generation 0."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: None)
dist.init_process_group("gloo", timeout=timedelta(minutes=30))
dist.barrier()
if os.environ["GOODRUN_GENERATION"] == "0":
    if rank == 1:
        sys.exit(3)
    dist.recv(torch.zeros(1), 2 - rank)
