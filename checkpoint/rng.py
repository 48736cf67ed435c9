"""The random states of one rank: captured, put back, or derived anew where the rank is not the one it was."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The states of python's, numpy's (if it is in use), torch's and the current CUDA device's generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: dict[str, Any]) -> None:
    """Continue every generator where `capture` found it."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def derive(seed: int, step: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank): at another world size there is no state to continue, but a run can be repeated."""
    number = mixed(seed, step, rank)
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


def mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers; neighbours give unrelated seeds."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
