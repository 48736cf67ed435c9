"""ElasticSampler: the same samples in the same order, wherever the run was interrupted and whatever the number of ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from goodrun.checkpoint import Checkpointer, ElasticSampler

STEPS = 60

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
x = torch.rand(1000, 8)
data = TensorDataset(x, x.prod(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = ElasticSampler(data, global_batch=32)
loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
model(x[:1]).sum().backward()  # DDP orders its buckets anew after its first backward: get that over with, then restore
optimizer.zero_grad()

checkpoints = Checkpointer("checkpoints", every=10, model=model, optimizer=optimizer, sampler=sampler)
step = checkpoints.restore()

while step < STEPS:
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        (loss * sampler.weight).backward()  # the mean over the global batch, also where ranks have unequal parts
        optimizer.step()
        step += 1
        checkpoints.step(step)
        if step == STEPS:
            break

checkpoints.close()
print(f"rank {dist.get_rank()}: step {step}, loss {loss.item():.4f}")
dist.destroy_process_group()
