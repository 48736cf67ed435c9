"""The node's keeper as the launcher has it: started before the ranks, started again if it dies, left to finish at the end."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .. import progress
from ..checkpoint.keeper import WELL
from ..checkpoint.link import keeper_command
from ..checkpoint.wire import ADDRESS_VARIABLE, Gone, address_of, connect
from .nodes.wires import family_of

_SAY_EVERY_S = 5.0
_TOO_OFTEN = 20
"""Deaths after which no new one is started: whatever kills it kills the next one too."""


@dataclass
class KeeperProcess:
    """Holds the snapshots of this node's ranks, in a process that outlives them."""

    say: Callable[[str], None]
    told: Callable[[dict[str, Any]], None]
    """Takes in what it tells of the saves."""
    bandwidth: float = 0.0
    """MiB per second that it may write; 0 is no limit."""
    patience_s: float = 60.0
    """How long storage across the network is asked again for one thing."""
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    chaos: Callable[[], Mapping[str, str]] = dict
    """What the next keeper needs to know of the faults that it has to do to its storage; empty for a keeper without any."""
    chaos_page: progress.Page | None = None
    """On which a keeper with faults tells those that have fired; it outlives every keeper."""
    _page_fd: int = -1
    _process: subprocess.Popen[bytes] | None = None
    _life: int = -1
    _vouched: int | None = None
    _deaths: int = 0
    _heard: bytes = b""
    _listener: socket.socket | None = None
    """Where other nodes' keepers call; it outlives every keeper."""
    _ring: dict[str, Any] | None = None
    """Which nodes come next, as the keeper is to be told."""
    _ring_told: bool = False

    def start(self) -> None:
        """Start it; ranks find it by its name."""
        ours, self._life = os.pipe()
        os.set_blocking(self._life, False)
        self._vouched = None
        options = ("--parent", str(ours), "--bandwidth", str(self.bandwidth), "--patience", str(self.patience_s))
        command, env, fds = keeper_command(self.name, *options), dict(os.environ), [ours]
        if faults := self.chaos():
            if self.chaos_page is None:
                self.chaos_page, self._page_fd = progress.Page.create()
            command = keeper_command(self.name, *options, module="goodrun.elastic_runner.faulty_keeper")
            env |= {**faults, progress.PAGE_FD_VARIABLE: str(self._page_fd)}
            fds.append(self._page_fd)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, pass_fds=fds, cwd="/", env=env
            )
        finally:
            os.close(ours)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._ring_told = False

    def open_at(self, address: str) -> int:
        """The port at which other nodes' keepers can send copies of their snapshots to this one; 0 where there is none to be had."""
        if self._listener is None:
            try:
                self._listener = socket.create_server((address, 0), family=family_of(address), backlog=64)
            except OSError as e:
                self.say(f"no snapshots are copied to this node: it cannot listen at {address}: {os.strerror(e.errno or 0)}")
                return 0
        return int(self._listener.getsockname()[1])

    def sends_to(self, keepers: Sequence[str], key: bytes) -> None:
        """Where it is to send copies of its snapshots, each "ADDRESS PORT"."""
        self._ring = {"op": "ring", "key": key.hex(), "next": [(at.split()[0], int(at.split()[1])) for at in keepers]}
        self._ring_told = False
        self._tell_ring()

    def _tell_ring(self) -> None:
        if self._ring is None or self._listener is None or self._ring_told:
            return
        if (line := connect(address_of(self.name))) is not None:  # else it is just starting
            with suppress(Gone):
                line.send(self._ring, fds=(self._listener.fileno(),))
                self._ring_told = True
            line.close()

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks need to find it."""
        return {ADDRESS_VARIABLE: self.name}

    @property
    def pid(self) -> int:
        """Its process id; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    def tend(self) -> None:
        """Start it again if it has died; the ranks give it what it had."""
        self._hear()
        self._tell_ring()
        if self._process is None or self._process.poll() is None or self._deaths >= _TOO_OFTEN:
            return
        self._deaths += 1
        os.close(self._life)
        self._hang_up()
        code = self._process.returncode
        self.say(f"the keeper of the checkpoints has died (status {code}): started again; what was committed is safe")
        self.start()

    def vouch(self, step: int) -> None:
        """Say that the devices of this node were well up to this step."""
        if step != self._vouched and self._process is not None:
            with suppress(OSError):  # it has died, and is told when it is started again; or it reads later, and is told then
                os.write(self._life, WELL.pack(step))
                self._vouched = step

    def close(self) -> None:
        """Let it finish what is whole in memory, and wait for that."""
        if self._process is None:
            return
        os.close(self._life)
        begin = time.monotonic()
        while True:
            try:
                self._process.wait(_SAY_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                self._hear()
                self.say(f"waiting for the last checkpoint to be written ({time.monotonic() - begin:.0f} s)")
        self._hang_up()
        self._process = None
        if self._listener is not None:
            self._listener.close()

    def _hear(self) -> None:
        """Take in what it has told, a JSON object a line."""
        if self._process is None or self._process.stdout is None:
            return
        with suppress(BlockingIOError):
            while some := os.read(self._process.stdout.fileno(), 1 << 16):
                *lines, self._heard = (self._heard + some).split(b"\n")
                for line in lines:
                    with suppress(ValueError):  # torn: the pipe was full for a moment
                        self.told(json.loads(line))

    def _hang_up(self) -> None:
        self._hear()
        self._heard = b""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
