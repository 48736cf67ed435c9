"""The test that lets a device back in, in a process of its own: its driver's answers, then work whose result is known."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence

from ...fault_injection.simulated_gpus import STATE_VARIABLE
from .answers import Report, Told
from .findings import findings

CPU = "cpu"
_SIZE = 48
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
_BLOCK = 1 << 22
_GPU_SIZE = 4096
_GPU_BLOCK = 1 << 28
_SLOWEST_COPY_GB_S = 100.0
"""Any GPU that trains copies within its own memory several times as fast."""


class Failed(Exception):
    """The device under test has not passed; the message says at what."""


def main(argv: Sequence[str]) -> int:
    """`PARENT DEVICE`: test the GPU of that UUID, or "cpu"; one JSON object with `passed` and `detail` on standard output."""
    from ..tied import die_with_parent

    die_with_parent(int(argv[0]))
    try:
        passed, detail = True, "; ".join(step() for step in steps(argv[1]))
    except Exception as e:  # the process's outermost boundary: whatever goes wrong in a test is a failed test
        passed, detail = False, str(e) if isinstance(e, Failed) else f"{type(e).__name__}: {e}"
    json.dump({"passed": passed, "detail": detail}, sys.stdout)
    return 0


def steps(device: str) -> list[Callable[[], str]]:
    """What is to be gone through, each step saying in words what it found."""
    if device == CPU:
        return [product, pattern]
    if STATE_VARIABLE in os.environ:  # a simulated GPU has a driver and nothing to compute with
        return [lambda: driver(device), product, pattern]
    return [lambda: driver(device), gpu_product, gpu_pattern, gpu_copy]


def driver(device: str) -> str:
    """The driver finds the device, answers, and has nothing against it."""
    from .nvml import Nvml

    nvml = Nvml()
    present, handle = nvml.handle(device)
    answers = {"present": present} if handle is None else {"present": present, **{q: nvml.ask(q, handle) for q in nvml.queries}}
    report = Report(device=device, answers=answers)
    if wrong := [f for f in findings(report, report, 0.0) if f.condition not in ("remap-pending", "inforom")]:
        raise Failed("; ".join(f"{f.name}: {f.evidence}" for f in wrong))
    values = sum(a.told is Told.VALUE for a in answers.values())
    if values < 2:
        raise Failed(f"the driver tells nothing of it but its presence ({', '.join(report.unknown())} unsupported)")
    return f"its driver answers {values} questions and finds nothing"


def product() -> str:
    """A matrix product of whole numbers, checked against its vector products (Freivalds)."""
    dice = random.Random(7)
    a, b = ([[dice.getrandbits(16) for _ in range(_SIZE)] for _ in range(_SIZE)] for _ in range(2))
    columns = list(zip(*b, strict=True))
    c = [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a]
    for _ in range(8):
        v = [dice.getrandbits(1) for _ in range(_SIZE)]
        if _times(c, v) != _times(a, _times(b, v)):
            raise Failed("a matrix product came out wrong")
    return "a checked matrix product is right"


def _times(m: list[list[int]], v: list[int]) -> list[int]:
    return [sum(x * y for x, y in zip(row, v, strict=True)) for row in m]


def pattern() -> str:
    """Memory holds what was written to it."""
    for byte in _PATTERNS:
        if bytearray([byte]) * _BLOCK != bytes([byte]) * _BLOCK:
            raise Failed(f"memory did not hold the pattern {byte:#04x}")
    return "memory holds its patterns"


def gpu_product() -> str:
    """The same matrix product twice is equal, bit for bit, and equal to its vector product within rounding."""
    import torch

    if not torch.cuda.is_available():
        raise Failed("torch finds no GPU under this UUID")
    torch.manual_seed(7)
    a, b = (torch.randn(_GPU_SIZE, _GPU_SIZE, device="cuda", dtype=torch.float64) for _ in range(2))
    v = torch.randn(_GPU_SIZE, device="cuda", dtype=torch.float64)
    c = a @ b
    if not torch.equal(c, a @ b):
        raise Failed("the same matrix product came out differently")
    if not torch.allclose(c @ v, a @ (b @ v), rtol=1e-9, atol=1e-6):
        raise Failed("a matrix product came out wrong")
    return "a checked matrix product is right"


def gpu_pattern() -> str:
    """The GPU's memory holds what was written to it."""
    import torch

    for byte in _PATTERNS:
        block = torch.full((_GPU_BLOCK,), byte, dtype=torch.uint8, device="cuda")
        if not bool((block == byte).all()):
            raise Failed(f"its memory did not hold the pattern {byte:#04x}")
    return "memory holds its patterns"


def gpu_copy() -> str:
    """Copying within its memory is not far slower than any GPU's."""
    import torch

    source = torch.zeros(_GPU_BLOCK, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    speed = 10 * _GPU_BLOCK / begin.elapsed_time(end) / 1e6
    if speed < _SLOWEST_COPY_GB_S:
        raise Failed(f"it copies {speed:.0f} GB/s, less than {_SLOWEST_COPY_GB_S:.0f}")
    return f"copies {speed:.0f} GB/s"
