"""What the ranks of a job on several nodes have written down, read back."""

from itertools import pairwise
from pathlib import Path


def stretches(where: Path):
    """From the first to the last step of each generation, by generation: (seconds, seconds, steps)."""
    found = {}
    for path in where.glob("times.g*.r*"):
        lines = [(float(line.split()[0]), int(line.split()[1])) for line in path.read_text().splitlines() if len(line.split()) == 2]
        if lines:
            generation = int(path.name.split(".")[1][1:])
            begin, end, best = found.get(generation, (float("inf"), 0.0, 0))
            found[generation] = min(begin, lines[0][0]), max(end, lines[-1][0]), max(best, lines[-1][1])
    return dict(sorted(found.items()))


def one_at_a_time(where: Path):
    """No generation made a step once a later one had made its first: no two halves have trained at once."""
    for (g, (_, end, _)), (later, (begin, _, _)) in pairwise(stretches(where).items()):
        assert end < begin, f"generation {g} made a step {end - begin:.3f} s after generation {later} had begun"
