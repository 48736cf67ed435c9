"""An accelerate script as one finds them, with its own way to save and resume, and nothing of goodrun in it.

It logs the samples of every step and leaves the hash of its final weights.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

epochs = int(sys.argv[1])
here = Path(os.environ["TEST_DIR"])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
points = torch.arange(48, dtype=torch.float32).unsqueeze(1) / 48
model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.arange(48), points), batch_size=6, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
log = open(here / f"samples.g{int(os.environ['TORCHELASTIC_RESTART_COUNT']):03d}.r{accelerator.process_index}", "a")  # noqa: SIM115

done = 0
if (here / "latest").is_dir():
    accelerator.load_state(here / "latest")
    done = int((here / "latest" / "step").read_text())
step = done
for epoch in range(done // len(loader), epochs):
    loader.set_epoch(epoch)
    left = accelerator.skip_first_batches(loader, step % len(loader)) if epoch == done // len(loader) else loader
    for ids, x in left:
        loss = torch.nn.functional.mse_loss(model(x), torch.sin(7 * x))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        print(step, accelerator.num_processes, *ids.tolist(), file=log, flush=True)
        if step % 3 == 0:
            accelerator.save_state(here / f"new.{step}")
            if accelerator.is_main_process:
                (here / f"new.{step}" / "step").write_text(str(step))
                shutil.rmtree(here / "latest", ignore_errors=True)
                (here / f"new.{step}").rename(here / "latest")
            accelerator.wait_for_everyone()
state = b"".join(p.detach().numpy().tobytes() for p in accelerator.unwrap_model(model).parameters())
(here / f"final.r{accelerator.process_index}").write_text(hashlib.sha256(state).hexdigest())
accelerator.end_training()
