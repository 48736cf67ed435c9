"""DDP with six samples per rank and step, whatever the number of ranks: what most scripts do."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.ones(60, 1), batch_size=6):
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
