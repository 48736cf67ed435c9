"""The worker's side of warm start: import what every rank needs, then hold still before the script until told to go.

A standby is `python -u train.py …` itself, held up in its sitecustomize: when it goes on, it is the very process that a cold start
would have made, with the slow imports behind it. Standard library only at the top; runs inside the worker.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from .. import progress

VARIABLE = "GOODRUN_STANDBY_FD"
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.utils.data", "torch.distributed.checkpoint")
"""torch._dynamo is what the first optimizer or DDP object imports behind the script's back: half of a start's seconds."""
READY = b"r"


def send_go(channel: socket.socket, env: Mapping[str, str], page: int, out: int | None, err: int | None) -> None:
    """The supervisor's side: let a standby go on as the rank that `env` describes. Raises OSError if it is gone."""
    kinds, fds = ["page"], [page]
    for kind, fd in (("out", out), ("err", err)):
        if fd is not None:
            kinds.append(kind)
            fds.append(fd)
    body = json.dumps({"env": dict(env), "fds": kinds}).encode()
    channel.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    channel.sendall(body)


def wait_for_go() -> None:
    """Import, say so, wait, and become the rank that the supervisor describes; a closed channel means that there is no such rank."""
    try:
        channel = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        for name in PRELOAD:
            with suppress(Exception):  # the script will meet whatever is wrong, and say so in its own name
                importlib.import_module(name)
        with suppress(OSError):  # told to go already
            channel.sendall(READY)
        env, fds = _receive(channel)
        channel.close()
        _become(env, fds)
    except BaseException:  # whatever happened: without its rank this process must never reach the script
        os._exit(1)


def _receive(channel: socket.socket) -> tuple[dict[str, str], dict[str, int]]:
    head, ancillary, _, _ = channel.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    raw, size = bytearray(), int.from_bytes(head, "big")
    while len(raw) < size and (part := channel.recv(size - len(raw))):
        raw += part
    body = json.loads(bytes(raw))
    return body["env"], dict(zip(body["fds"], fds, strict=True))


def _become(env: dict[str, str], fds: dict[str, int]) -> None:
    os.environ.clear()
    os.environ.update(env)
    for kind, target in (("out", 1), ("err", 2)):
        if kind in fds:
            os.dup2(fds[kind], target)
            os.close(fds[kind])
    os.environ[progress.PAGE_FD_VARIABLE] = str(fds["page"])
