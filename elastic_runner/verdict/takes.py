"""One take of a rehearsal: a whole run of the job in a folder of its own, by as many launchers as chaos ends, and what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...checkpoint.rehearsal import REHEARSAL_VARIABLE
from ...fault_injection import ENDS_THE_LAUNCHER
from .. import processes
from ..errors import GoodrunError
from ..events import ChaosFired, WorkersSpawned
from ..journal import FILE_NAME, read_events

_FOLDER = str(Path(__file__).resolve().parents[3])
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from goodrun.elastic_runner.cli import console; console()"
_FILE = "take.json"
_SETTLES_WITHIN_S, _GOES_WITHIN_S = 60.0, 3.0
"""How long a keeper may take, after its launcher was killed, to write what is whole and go; and others after an orderly end."""
_NOT_OURS = ("torchinductor_", "tmp", "pymp-", "__pycache__")
"""What torch, and any Python process that is killed, leaves in the folder for temporary files."""


class NoTake(GoodrunError):
    """A folder that was named as a take of a rehearsal is none: the caller's slip."""


@dataclass(frozen=True, kw_only=True)
class Take:
    """How one went. `status` is None where it did not end within its time; `lives` counts the launchers that it took."""

    folder: Path
    status: int | None
    seconds: float
    lives: int
    left: tuple[str, ...]
    """What it left behind, in words."""

    @property
    def run_dir(self) -> Path:
        """Its record."""
        return self.folder / "run"

    def save(self) -> None:
        """Write it down, for a later verdict."""
        body = {**asdict(self), "folder": str(self.folder)}
        (self.folder / _FILE).write_text(json.dumps(body))

    @classmethod
    def load(cls, folder: Path) -> Take:
        """One that was written down. Raises NoTake."""
        try:
            body = json.loads((folder / _FILE).read_text())
            return cls(**{**body, "folder": folder, "left": tuple(body["left"])})
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise NoTake(f"{folder} holds no take of a rehearsal ({type(e).__name__}); give the folder `quiet` or `chaos` of one") from e


def perform(words: Sequence[str], folder: Path, within_s: float) -> Take:
    """Run `goodrun` with these words in `folder`, at most `within_s` seconds (0: for as long as it takes)."""
    folder.mkdir(parents=True)
    temporary = tempfile.mkdtemp(prefix="goodrun-")  # a short name: sockets are made in there
    env = {**os.environ, REHEARSAL_VARIABLE: str(folder), "TMPDIR": temporary}
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set[str]()
    begin, lives, status = time.monotonic(), 0, None
    try:
        with open(folder / "output.txt", "ab") as out:
            while True:
                lives += 1
                left_s = within_s - (time.monotonic() - begin) if within_s else None
                status = _one_life([sys.executable, "-c", _CODE, _FOLDER, *words], env, out.fileno(), left_s)
                _settle(folder, _GOES_WITHIN_S if status is not None and status >= 0 else _SETTLES_WITHIN_S)
                if status is None or status == 0 or lives > _ends(folder / "run"):
                    break
        seconds = time.monotonic() - begin
        take = Take(folder=folder, status=status, seconds=seconds, lives=lives, left=_left(folder, temporary, shared))
    finally:
        for pid in living(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)
    take.save()
    return take


def _one_life(command: list[str], env: dict[str, str], out: int, within_s: float | None) -> int | None:
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # its time is up, or we were told to stop: its ranks die with it
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()


def _ends(run_dir: Path) -> int:
    """How many launchers the plan has ended so far."""
    if not (run_dir / FILE_NAME).exists():
        return 0
    fired = (e.entry.partition("@")[0].partition(":")[0].strip() for e in read_events(run_dir) if isinstance(e, ChaosFired))
    return sum(kind in ENDS_THE_LAUNCHER for kind in fired)


def _settle(folder: Path, within_s: float) -> None:
    end = time.monotonic() + within_s
    while living(folder) and time.monotonic() < end:
        time.sleep(0.05)  # these are nobody's children any more: there is no event for their end


def living(folder: Path) -> list[int]:
    """The processes of a take that live, by what they have in their environment."""
    mark = f"{REHEARSAL_VARIABLE}={folder}\0".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid() and _bears(name, mark)]


def _bears(pid: str, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes() and processes.state(int(pid)) not in "ZX"
    except OSError:
        return False


def _left(folder: Path, temporary: str, shared_before: set[str]) -> tuple[str, ...]:
    left = [f"process {pid} ({_command(pid)})" for pid in living(folder)]
    left += [f"the temporary file {name}" for name in sorted(os.listdir(temporary)) if not name.startswith(_NOT_OURS)]
    if (folder / "run" / FILE_NAME).exists() and os.path.isdir("/dev/shm"):
        pids = {str(pid) for e in read_events(folder / "run") if isinstance(e, WorkersSpawned) for pid in e.pids}
        fresh = sorted(set(os.listdir("/dev/shm")) - shared_before)
        left += [f"/dev/shm/{name}" for name in fresh if pids & set(name.replace("-", "_").split("_"))]
    return tuple(left)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:100]
    except OSError:
        return "gone by now"
