"""torch.distributed.checkpoint: every rank writes a part, and the file can be read at any number of ranks."""

import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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

step = 0
if whole := glob.glob("dcp/*/.metadata"):  # written last
    newest = max(os.path.dirname(path) for path in whole)
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "step": step}
    dcp.load(saved, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    step = saved["step"]

while step < STEPS:
    sampler.set_epoch(step // len(loader))
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=f"dcp/{step:010d}")
        if step == STEPS:
            break

print(f"rank {dist.get_rank()}: step {step}, loss {loss.item():.4f}")
dist.destroy_process_group()
