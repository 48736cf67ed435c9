"""A training job for ckpt-chaos: `chaos_train.py FOLDER`. Its keeper runs inside it, so that every file event of a save can be its last."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch

from goodrun.checkpoint import Checkpointer, Keep
from goodrun.checkpoint.keeper import Keeper, listen
from goodrun.checkpoint.wire import ADDRESS_VARIABLE

STEPS = 4


def main(folder: Path) -> None:
    """Train a few steps, saving after each; leave the final weights."""
    name = f"chaos-{os.getpid()}"
    listener = listen(name)
    assert listener is not None
    os.environ |= {ADDRESS_VARIABLE: name, "GOODRUN_RUN_STARTED": "1000", "GOODRUN_GENERATION": "0"}  # the same names in every run
    ours, _ = os.pipe()  # it lives as long as this process does
    threading.Thread(target=Keeper(listener, parent=ours).run, daemon=True).start()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(folder / "ckpt", every=2, keep=Keep(last=10), model=model, optimizer=optimizer) as checkpoints:
        step = checkpoints.restore()
        while step < STEPS:
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            step += 1
            checkpoints.step(step)
            checkpoints.wait()
    (folder / "final.json").write_text(json.dumps([p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
