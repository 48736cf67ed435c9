"""goodrun's Checkpointer: a process beside the ranks writes, and what is restored is the newest checkpoint that is whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from goodrun.checkpoint import Checkpointer

STEPS = 60

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
x = torch.rand(1000, 8)
data = TensorDataset(x, x.prod(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)

checkpoints = Checkpointer("checkpoints", every=10, model=model, optimizer=optimizer)
step = checkpoints.restore()

while step < STEPS:
    sampler.set_epoch(step // len(loader))
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        checkpoints.step(step)
        if step == STEPS:
            break

checkpoints.close()
print(f"rank {dist.get_rank()}: step {step}, loss {loss.item():.4f}")
dist.destroy_process_group()
