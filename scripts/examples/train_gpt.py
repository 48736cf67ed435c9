"""A small character GPT on Python's own documentation: DDP over gloo, and restarts that are exact to the last bit."""

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from goodrun.checkpoint import Checkpointer, ElasticSampler

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 3


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.letter(x) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--checkpoints", default="checkpoints")
parser.add_argument("--quiet", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
text = "".join(topics.values())
alphabet = {letter: i for i, letter in enumerate(sorted(set(text)))}
windows = torch.tensor([alphabet[letter] for letter in text]).unfold(0, CONTEXT + 1, CONTEXT)

model = DistributedDataParallel(GPT(len(alphabet)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = ElasticSampler(windows, global_batch=32, seed=0)
loader = DataLoader(windows, batch_sampler=sampler, generator=torch.Generator())
model(windows[:1, :-1]).sum().backward()  # DDP orders its buckets anew after its first backward: get that over with, then restore
optimizer.zero_grad()

checkpoints = Checkpointer(args.checkpoints, every=10, model=model, optimizer=optimizer, sampler=sampler)
step = checkpoints.restore()
while step < args.steps:
    for batch in loader:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss * sampler.weight).backward()  # the exact mean over the global batch, even where it does not divide by the ranks
        optimizer.step()
        step += 1
        checkpoints.step(step, loss=loss.item())
        if (step % 10 == 0 or step == 1) and dist.get_rank() == 0 and not args.quiet:
            print(f"step {step:4d}  loss {loss.item():.4f}  on {dist.get_world_size()} ranks", flush=True)
        if step == args.steps:
            break
checkpoints.close()
dist.destroy_process_group()
