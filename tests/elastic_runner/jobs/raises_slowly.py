"""Rank 1 raises, lets go of its connections, and takes for ever to end; rank 0 dies of that. In generation 0 only."""

import atexit
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["GOODRUN_GENERATION"] == "0":
    if dist.get_rank() == 1:
        atexit.register(signal.pause)
        atexit.register(dist.destroy_process_group)
        raise ValueError("mine")
    dist.recv(torch.zeros(1), 1)
