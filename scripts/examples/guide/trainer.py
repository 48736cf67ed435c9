"""Hugging Face's Trainer, kept by goodrun: one line more."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from goodrun.checkpoint.frameworks.transformers import TrainerCheckpoints

rows = [{"input_ids": row, "labels": row} for row in torch.arange(640).remainder(16).view(80, 8)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments("output", num_train_epochs=3, save_strategy="no", report_to="none", disable_tqdm=True)

trainer = Trainer(model, arguments, train_dataset=rows)
TrainerCheckpoints(trainer, "trainer-checkpoints", every=2, global_batch=16)
trainer.train()
