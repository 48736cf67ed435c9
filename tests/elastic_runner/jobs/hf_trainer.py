"""A GPT-2 of a few thousand weights under Hugging Face's Trainer: logs the samples of every step, leaves the hash of its final weights.

Arguments: epochs, samples per optimizer step over all ranks, micro-batches per optimizer step,
optimizer steps between checkpoints.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from goodrun.checkpoint.frameworks.transformers import TrainerCheckpoints

epochs, global_batch, parts, every = map(int, sys.argv[1:])
here = Path(os.environ["TEST_DIR"])
rank, generation = int(os.environ["RANK"]), int(os.environ["GOODRUN_GENERATION"])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        row = torch.tensor([(i * k) % 16 for k in range(8)])
        return {"input_ids": row, "labels": row, "id": i}


class Log(TrainerCallback):
    """Which samples each optimizer step was made of."""

    def __init__(self):
        self.ids, self.log = [], open(here / f"samples.g{generation:03d}.r{rank}", "a")  # noqa: SIM115

    def on_step_end(self, args, state, control, **_):
        print(state.global_step, os.environ["WORLD_SIZE"], *self.ids, file=self.log, flush=True)
        self.ids.clear()


class Tiny(Trainer):
    def compute_loss(self, model, inputs, **more):
        ids = inputs.pop("id").tolist()
        log.ids.extend(ids if model.training else [])
        return super().compute_loss(model, inputs, **more)


log = Log()
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir=here / "output",
    use_cpu=True,
    num_train_epochs=epochs,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=parts,
    learning_rate=0.01,
    logging_steps=3,
    save_strategy="no",
    eval_strategy="steps",
    eval_steps=2,
    report_to="none",
    disable_tqdm=True,
    ddp_find_unused_parameters=True,
    remove_unused_columns=False,
)
torch.manual_seed(0)
trainer = Tiny(GPT2LMHeadModel(config), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[log])
TrainerCheckpoints(trainer, here / "checkpoints", every=every, global_batch=global_batch)
trainer.train()
state = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
(here / f"final.r{rank}").write_text(f"{hashlib.sha256(state).hexdigest()} {trainer.state.global_step} {trainer.state.epoch}")
if rank == 0:
    told = [f"{e['step']} {e['learning_rate']} {e['epoch']}" for e in trainer.state.log_history if "loss" in e]
    (here / "final.history").write_text("\n".join(told))
