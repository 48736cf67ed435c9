"""Rank 1 raises in generation 0 and takes for ever to end.

`raises_slowly.py closes`: it lets go of its connections, and rank 0 dies of that; `thread`: a thread of its own keeps it and them.
"""

import atexit
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

from goodrun import heartbeat

dist.init_process_group("gloo")
for step in range(1, 10):
    dist.barrier()
    heartbeat(step=step)
    threading.Event().wait(0.02)
if os.environ["GOODRUN_GENERATION"] == "0":
    if dist.get_rank() == 1:
        if sys.argv[1] == "thread":
            threading.Thread(target=threading.Event().wait).start()
        else:
            atexit.register(signal.pause)
            atexit.register(dist.destroy_process_group)
        raise ValueError("mine")
    dist.recv(torch.zeros(1), 1)
