"""A job whose every step waits: `data=S` in its loader, `save=S` in a checkpoint, `eval=S` in an evaluation, `compute=S` on rank 1."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from goodrun import heartbeat
from goodrun.progress import Phase, in_phase, page

steps, waits = int(sys.argv[1]), {k: float(v) for k, v in (word.split("=") for word in sys.argv[2:])}
dist.init_process_group("gloo")


class Samples(Dataset):
    def __len__(self):
        return steps

    def __getitem__(self, i):
        time.sleep(waits.get("data", 0))
        return torch.ones(4)


model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, batch in enumerate(DataLoader(Samples(), batch_size=1), 1):
    if dist.get_rank() == 1:
        time.sleep(waits.get("compute", 0))
    model(batch).sum().backward()
    optimizer.step()
    heartbeat(step=n)
    if "save" in waits:
        begin = time.monotonic_ns()
        with in_phase(Phase.SAVE):
            time.sleep(waits["save"])
        page().save_stalled(time.monotonic_ns() - begin)
    if "eval" in waits:
        heartbeat(phase="eval")
        time.sleep(waits["eval"])
        heartbeat(phase="step")
dist.destroy_process_group()
