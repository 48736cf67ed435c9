"""Meets one adversity of the machine around it, as its first argument says."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Batches(torch.utils.data.Dataset):
    """Items of 4 MiB."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.zeros(1 << 20)


what, rank, generation = sys.argv[1], os.environ["RANK"], os.environ["GOODRUN_GENERATION"]
here = Path(os.environ["TEST_DIR"])
if what == "reduce":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
elif what == "load":
    for _ in torch.utils.data.DataLoader(Batches(), num_workers=1):
        pass
elif what == "print":
    for _ in range(2**14):
        print("x" * 63)
    (here / f"printed.{rank}").touch()
elif what == "print and beat":
    import goodrun

    for step in range(10**6):
        goodrun.heartbeat(step=step)
        print("x" * 63)
        time.sleep(0.0005)
elif what == "killed at step 4":
    import goodrun

    held = bytearray(64 << 20)
    dist.init_process_group("gloo")
    for step in range(1, 8):
        dist.all_reduce(torch.ones(1))
        goodrun.heartbeat(step=step)
        time.sleep(0.3)
        if step == 4 and rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
elif what == "stuck and deaf":
    import atexit

    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    atexit.register(dist.barrier)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for step in range(8):
        if step == 5 and generation == "0":
            dist.recv(torch.zeros(1), 1 - int(rank)) if rank == "0" else time.sleep(300)
        dist.all_reduce(torch.ones(1))
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
        time.sleep(0.02)
elif what == "stuck at the end":
    import goodrun

    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    for step in range(1, 5):
        dist.all_reduce(torch.ones(1))
        goodrun.heartbeat(step=step)
        time.sleep(0.02)
    if rank == "1":
        dist.barrier()
