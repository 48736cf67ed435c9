"""FSDP2 and tensor parallelism: pairs of ranks share each layer, and the pairs share the data."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from goodrun.checkpoint import Checkpointer, ElasticSampler

STEPS = 60

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
x = torch.rand(1000, 8)
data = TensorDataset(x, x.prod(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = ElasticSampler(data, global_batch=32, rank=mesh.get_local_rank("data"), world_size=mesh["data"].size())
loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())

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
