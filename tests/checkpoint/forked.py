"""Forks the ranks of one job after the other, torch being there already; jobs come as lines of JSON on stdin.

For each job a line with the ranks' process ids goes to stdout, and one with their exit statuses once all have ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.data

from goodrun.checkpoint import checkpointer  # noqa: F401


def begin(job: dict[str, Any], rank: int) -> None:
    """Turn this fresh child into a rank: its environment, its arguments, its stderr in a file."""
    os.environ.clear()
    os.environ.update(job["environ"], RANK=str(rank))
    sys.argv = job["argv"]
    nothing = os.open(os.devnull, os.O_RDWR)
    said = os.open(f"{job['stderr']}.r{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for fd, place in ((nothing, 0), (nothing, 1), (said, 2)):
        os.dup2(fd, place)


def serve() -> bool:
    """Until stdin ends; True in a child, which is to play its part."""
    while line := sys.stdin.readline():
        job, pids = json.loads(line), []
        for rank in range(job["world"]):
            if (pid := os.fork()) == 0:
                begin(job, rank)
                return True
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    if serve():
        import workers

        workers.main()
