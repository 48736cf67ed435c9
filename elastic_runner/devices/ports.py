"""InfiniBand and RoCE ports, from sysfs: one that was active when the job began and is not is told, and for how long it was away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ROOT_VARIABLE = "GOODRUN_INFINIBAND"
"""Another folder to look in than the kernel's own."""
_KERNELS = "/sys/class/infiniband"
_ACTIVE = "ACTIVE"


def states(root: str | None = None) -> dict[str, str]:
    """The logical state of each port ("ACTIVE", "DOWN" …) by its name, as "mlx5_0/1"; empty where there is none. May hang in its driver."""
    found = {}
    for path in sorted(Path(root or os.environ.get(ROOT_VARIABLE, _KERNELS)).glob("*/ports/*/state")):
        with suppress(OSError):  # the port has gone while we looked
            found[f"{path.parts[-4]}/{path.parts[-2]}"] = path.read_text().rpartition(":")[2].strip()
    return found


class PortWatch:
    """The ports that were active at the start."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._expected: frozenset[str] | None = None
        self._down_t: dict[str, float] = {}
        self._away_s: dict[str, float] = {}

    def look(self, now: Mapping[str, str]) -> None:
        """Say what has changed. What a port was away adds up: one outage of a few seconds can end a run."""
        if self._expected is None:
            self._expected = frozenset(port for port, state in now.items() if state == _ACTIVE)
        for port in sorted(self._expected):
            state = now.get(port, "gone")
            if state != _ACTIVE and port not in self._down_t:
                self._down_t[port] = self._clock()
                self._say(f"network port {port} is {state}: ranks that talk through it wait, or lose their connections")
            elif state == _ACTIVE and port in self._down_t:
                away_s = self._clock() - self._down_t.pop(port)
                self._away_s[port] = self._away_s.get(port, 0.0) + away_s
                self._say(f"network port {port} is back after {away_s:.0f} s ({self._away_s[port]:.0f} s in all since the job began)")
