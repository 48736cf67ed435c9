"""Whether two takes have trained on the same samples: what every batch was made of in the attempt that counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ...checkpoint.rehearsal import SAMPLES

Batch = tuple[int, int]
"""The epoch, and the position in it at which a batch begins."""


def trained_on(folder: Path) -> dict[Batch, Counter[int]]:
    """The samples of each batch over all ranks. Of attempts that trained on it, the newest counts: the others' steps were thrown away."""
    newest: dict[Batch, tuple[tuple[int, int], Counter[int]]] = {}
    for path in sorted((folder / SAMPLES).glob("*.*.*")):
        started, attempt, _ = path.name.split(".")
        life = int(started), int(attempt)
        for line in path.read_text().splitlines():
            epoch, position, *samples = map(int, line.split())
            key = epoch, position
            if key not in newest or newest[key][0] < life:
                newest[key] = life, Counter()
            if newest[key][0] == life:
                newest[key][1].update(samples)
    return {key: samples for key, (_, samples) in newest.items()}


def difference(quiet: dict[Batch, Counter[int]], hurt: dict[Batch, Counter[int]]) -> str:
    """How the samples differ, in words; empty if they do not. Batches may be cut differently where the global batch is."""
    if quiet == hurt:
        return ""
    for epoch in sorted({e for e, _ in (*quiet, *hurt)}):
        one, other = (_of_epoch(take, epoch) for take in (quiet, hurt))
        lost, repeated = one - other, other - one
        if lost or repeated:
            parts = [f"{n.total()} {what} (as {min(n)})" for n, what in ((lost, "lost"), (repeated, "repeated or new")) if n]
            return f"epoch {epoch}: {', '.join(parts)}"
    return ""


def _of_epoch(take: dict[Batch, Counter[int]], epoch: int) -> Counter[int]:
    return sum((samples for (e, _), samples in take.items() if e == epoch), Counter[int]())
