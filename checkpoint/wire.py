"""How ranks and their keeper talk: frames of JSON over a local socket, with file descriptors and raw bytes alongside."""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import threading
import time
from typing import Any

_HEAD = struct.Struct("<III")  # bytes of JSON, raw bytes after it, descriptors with it
_MOST_FDS = 8
ADDRESS_VARIABLE = "GOODRUN_KEEPER"
"""Where this node's keeper listens, if a launcher keeps one."""
RESTORE_VARIABLE = "GOODRUN_RESTORE_FROM"
"""A step, or the path of a checkpoint, that a run begins from (`goodrun --restore-from`)."""

Message = dict[str, Any]


class Gone(Exception):
    """The other side closed the connection, or was killed: nobody's fault here."""


class Line:
    """One end of a connection: whole messages in, whole messages out."""

    def __init__(self, sock: socket.socket) -> None:
        """The socket becomes this object's."""
        self.sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For select."""
        return self.sock.fileno()

    def send(self, message: Message, raw: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one message; raises Gone where nobody is there to take it."""
        body = json.dumps(message).encode()
        frame = _HEAD.pack(len(body), len(raw), len(fds)) + body + raw
        try:
            with self._sending:  # a frame from another thread must not come between
                self._put(frame, fds)
        except OSError as e:
            raise Gone from e

    def _put(self, frame: bytes, fds: tuple[int, ...]) -> None:
        sent = socket.send_fds(self.sock, [frame], list(fds)) if fds else self.sock.send(frame)
        if sent < len(frame):
            self.sock.sendall(memoryview(frame)[sent:])

    def receive(self, timeout_s: float | None = None) -> tuple[Message, bytes, list[int]] | None:
        """The next message with its raw bytes and descriptors; None if none came within the time. Raises Gone at the end."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while (whole := self._whole()) is None:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            left = None if end is None else max(0.0, end - time.monotonic()) * 1000
            if not poll.poll(left):
                return None
            self.read()
        return whole

    def read(self) -> None:
        """Take in what has arrived; raises Gone at the end."""
        try:
            data, extra, _, _ = self.sock.recvmsg(1 << 18, socket.CMSG_LEN(_MOST_FDS * 4), socket.MSG_CMSG_CLOEXEC)
        except OSError as e:
            raise Gone from e
        for level, kind, payload in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._fds += numbers
        if not data:
            raise Gone
        self._buffer += data

    def _whole(self) -> tuple[Message, bytes, list[int]] | None:
        if len(self._buffer) < _HEAD.size:
            return None
        body, raw, fds = _HEAD.unpack_from(self._buffer)
        end = _HEAD.size + body + raw
        if len(self._buffer) < end:
            return None
        message: Message = json.loads(bytes(self._buffer[_HEAD.size : _HEAD.size + body]))
        extra = bytes(self._buffer[_HEAD.size + body : end])
        del self._buffer[:end]
        mine, self._fds = self._fds[:fds], self._fds[fds:]
        return message, extra, mine

    def messages(self) -> list[tuple[Message, bytes, list[int]]]:
        """All whole messages that have been read."""
        found = []
        while (whole := self._whole()) is not None:
            found.append(whole)
        return found

    def close(self) -> None:
        """Hang up."""
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def address_of(name: str) -> str:
    """The address of a keeper by a name of one's choice: in the kernel's own name space, so no file is left behind."""
    return "\0goodrun-" + name


def connect(address: str) -> Line | None:
    """A line to the keeper at this address; None if nobody listens, or it is somebody else's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(address)
        if same_user(sock):
            return Line(sock)
    except OSError:
        pass
    sock.close()
    return None


def same_user(sock: socket.socket) -> bool:
    """Whether the other side belongs to us: names in the kernel's name space have no owner."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())
