"""A tiny Lightning module under Lightning's Trainer: logs the samples of every batch, leaves the hash of its final weights.

Arguments: epochs, samples per training step over all ranks, training steps per optimizer step,
optimizer steps between checkpoints.
"""

import hashlib
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from goodrun.checkpoint.frameworks.lightning import LightningCheckpoints, LightningSampler

warnings.filterwarnings("ignore", ".*does not have many workers")
epochs, global_batch, parts, every = map(int, sys.argv[1:])
here = Path(os.environ["TEST_DIR"])
rank, generation = int(os.environ["RANK"]), int(os.environ["GOODRUN_GENERATION"])
points = torch.arange(50, dtype=torch.float32).unsqueeze(1) / 50


class Tiny(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.samples = open(here / f"samples.g{generation:03d}.r{rank}", "a")  # noqa: SIM115

    def training_step(self, ids):
        loss = torch.nn.functional.mse_loss(self.net(points[ids]), torch.sin(points[ids] * 7))
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        at = self.trainer.current_epoch * self.trainer.num_training_batches + batch_idx
        print(at, os.environ["WORLD_SIZE"], *batch.tolist(), file=self.samples, flush=True)

    def validation_step(self, ids):
        self.log("validation", torch.nn.functional.mse_loss(self.net(points[ids]), torch.sin(points[ids] * 7)), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


torch.manual_seed(0)
model = Tiny()
sampler = LightningSampler(50, global_batch=global_batch, seed=3, drop_last=parts > 1)
loader = DataLoader(range(50), batch_sampler=sampler, generator=torch.Generator())
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp_find_unused_parameters_true",
    max_epochs=epochs,
    accumulate_grad_batches=parts,
    use_distributed_sampler=False,
    callbacks=[LightningCheckpoints(here / "checkpoints", every=every, sampler=sampler), EarlyStopping("validation", patience=100)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(model, loader, DataLoader(range(50), batch_size=25, generator=torch.Generator()))
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
rate = trainer.optimizers[0].param_groups[0]["lr"]
counts = f"{trainer.global_step} {trainer.current_epoch} {trainer.early_stopping_callback.wait_count}"
(here / f"final.r{rank}").write_text(f"{hashlib.sha256(state).hexdigest()} {rate} {counts}")
