"""GPUs that are not there: NVIDIA's library is stood in for by a small one of our own, and what it answers is written to a file.

The real nvidia-ml-py loads it, so everything above the C library is what runs on a machine with GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

STATE_VARIABLE = "GOODRUN_SIMULATED_GPUS"
"""Where the state file is, for the library and for a rank that has to do its device harm."""
_SOURCE = Path(__file__).with_name("simulated_nvml.c")
_LIBRARY = "libnvidia-ml.so.1"


class CannotSimulate(RuntimeError):
    """The stand-in for NVIDIA's library could not be built: this machine has no C compiler, or it failed."""


class SimulatedGpus:
    """A node's simulated GPUs. Every change is one appended line, so that any process may make one at any moment."""

    def __init__(self, state: Path) -> None:
        self._state = state

    @classmethod
    def create(cls, folder: Path, count: int, name: str = "Simulated GPU") -> SimulatedGpus:
        """`count` healthy devices in `folder`, with the library beside their state. Raises CannotSimulate."""
        folder.mkdir(parents=True, exist_ok=True)
        _build(folder / _LIBRARY)
        gpus = cls(folder / "gpus.state")
        devices = "".join(f"{n}.uuid={gpus.uuid(n)}\n{n}.name={name}\n" for n in range(count))
        gpus._state.write_text(f"gpus={count}\n{devices}")
        return gpus

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> SimulatedGpus | None:
        """Those that a process was started with, if any."""
        return cls(Path(env[STATE_VARIABLE])) if STATE_VARIABLE in env else None

    @staticmethod
    def uuid(device: int) -> str:
        """The UUID of a device, in the driver's form."""
        return f"GPU-{device:08x}-5111-4ada-8000-{device:012x}"

    def env(self, around: Mapping[str, str]) -> dict[str, str]:
        """What a process needs in its environment to see them, beside `around`, its environment otherwise."""
        paths = [str(self._state.parent), *filter(None, [around.get("LD_LIBRARY_PATH")])]
        return {STATE_VARIABLE: str(self._state), "LD_LIBRARY_PATH": ":".join(paths)}

    def set(self, device: int, what: str, value: int | str, *, for_s: float | None = None) -> None:
        """Let a device answer `value` from now on, or for `for_s` seconds; simulated_nvml.c lists what can be set."""
        until = "" if for_s is None else f" until {time.monotonic() + for_s:.3f}"
        self._append(f"{device}.{what}={value}{until}")

    def set_driver(self, what: str, value: int) -> None:
        """The same for what belongs to no device, as `Init.returns`."""
        self._append(f"{what}={value}")

    def xid(self, device: int, code: int) -> None:
        """Let a device report an XID."""
        self._append(f"xid={device},{code}")

    def _append(self, line: str) -> None:
        fd = os.open(self._state, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, f"{line}\n".encode())  # one write: lines of several writers do not mix
        finally:
            os.close(fd)


def _build(library: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise CannotSimulate("simulated GPUs need a C compiler (cc or gcc), and there is none on PATH")
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], capture_output=True, text=True, check=False)
    if built.returncode:
        raise CannotSimulate(f"{compiler} cannot build the simulated GPUs: {built.stderr.strip() or f'status {built.returncode}'}")
