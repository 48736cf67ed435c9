"""A number that tells whether a model is the same on every rank that holds it whole. The launcher compares it: the ranks need not meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from ..progress import Page

_WORD = 8
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


class Replicas:
    """The digests of these modules' parameters. Each costs a pass over their memory, on a GPU one that the loop does not wait for."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Raises ValueError where there is nothing that every rank holds whole."""
        self._modules = modules
        self._taken: tuple[int, torch.Tensor] | None = None
        self._copied: torch.cuda.Event | None = None
        if not self._parameters():
            raise ValueError("check_replicas=True, and no model is given that every rank holds whole; leave it out")

    def take(self, step: int) -> None:
        """Digest the parameters as they are now, after step `step`."""
        parameters = self._parameters()
        total = torch.zeros((), dtype=torch.int64, device=parameters[0].device)
        for p in parameters:
            total = (total.to(p.device) ^ _sum(p)) * _MIX  # wraps around
            total ^= total >> 32  # the page keeps the lower bits
        if total.is_cuda:
            total = torch.empty_like(total, device="cpu", pin_memory=True).copy_(total, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._taken = step, total

    def tell(self, page: Page) -> None:
        """Put the digest on the page, if a new one was taken and is there: nothing waits for a GPU."""
        if self._taken is not None and (self._copied is None or self._copied.query()):
            step, total = self._taken
            self._taken = None
            page.replica(step, int(total))

    def _parameters(self) -> list[torch.Tensor]:
        return [p.detach() for module in self._modules for p in module.parameters() if not isinstance(p, DTensor)]


def _sum(p: torch.Tensor) -> torch.Tensor:
    """Of its bytes, read as whole numbers: any one bit that differs makes it another one."""
    raw = p.reshape(-1).view(torch.uint8)
    raw = raw if raw.storage_offset() % _WORD == 0 else raw.clone()
    whole = len(raw) // _WORD * _WORD
    rest = pad(raw[whole:], (0, whole + _WORD - len(raw)))
    return raw[:whole].view(torch.int64).sum() + rest.view(torch.int64).sum()
