"""Lightning's Trainer, kept by goodrun: a callback, and the order of the data."""

import os

import lightning
import torch
from torch.utils.data import DataLoader

from goodrun.checkpoint.frameworks.lightning import LightningCheckpoints, LightningSampler

data = [(x, x.prod().view(1)) for x in torch.rand(80, 8, generator=torch.Generator().manual_seed(0))]


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


sampler = LightningSampler(data, global_batch=16)
trainer = lightning.Trainer(
    max_epochs=3,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # as many as goodrun has started
    use_distributed_sampler=False,
    callbacks=[LightningCheckpoints("lightning-checkpoints", every=2, sampler=sampler)],
    enable_checkpointing=False,
    logger=False,
)
trainer.fit(Net(), DataLoader(data, batch_sampler=sampler, generator=torch.Generator()))
