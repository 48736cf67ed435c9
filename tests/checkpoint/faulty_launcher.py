"""A real launcher of two ranks whose keeper kills it at one call of a save: `faulty_launcher.py AT FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from goodrun.elastic_runner import keeper
from goodrun.elastic_runner.cli import main

HERE = Path(__file__).parent


def command(name: str, *options: str, module: str = "") -> list[str]:
    """The words that start the keeper."""
    return [sys.executable, str(HERE / "faulty_keeper.py"), "KILL:pid.launcher", at, "before", folder, name, *options]


if __name__ == "__main__":
    at, folder = sys.argv[1:]
    Path(folder, "pid.launcher").write_text(str(os.getpid()))
    os.environ["STORE"] = str(Path(folder, "store"))
    keeper.keeper_command = command
    main(["--nproc-per-node", "2", str(HERE / "workers.py"), "matrix", folder, str(Path(folder, "ckpt")), "wait"])
