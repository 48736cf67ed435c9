"""A mounted object store for the tests: `mounts.py FOLDER [FAIL_EVERY]` mounts a real file system that takes files front to back only.

It speaks the kernel's FUSE protocol itself and keeps everything in memory. What such mounts refuse it refuses: renames, links, appends,
writes but at the end, a second opening for writing, syncs of directories. A file's content can be seen once it is closed or synced.
With FAIL_EVERY, every so manyth request that changes something fails with EIO. It says `mounted` on stdout, and ends when stdin does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field

_HEAD = struct.Struct("<IIQQIIII")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_OPENED = struct.Struct("<QII")
_DIRECT_IO = 1
_SIZE = 1 << 3  # of the attributes that are to be set
_MAX_WRITE = 128 << 10
_FLUSH, _CHANGING = 25, {9, 10, 11, 16, 20, 35}
_NO_ANSWER = {2, 36, 42}
_DETACHED = 2


class Refused(Exception):
    """The answer is an errno."""


@dataclass
class Node:
    """A file, or a directory where `names` is not None."""

    number: int
    names: dict[str, Node] | None = None
    content: bytes = b""

    @property
    def attributes(self) -> bytes:
        """As the kernel has them."""
        mode, size = (stat.S_IFREG | 0o644, len(self.content)) if self.names is None else (stat.S_IFDIR | 0o755, 0)
        return _ATTR.pack(self.number, size, (size + 511) // 512, *[0] * 6, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)


@dataclass
class Volume:
    """The file system. A method is named after a request, and returns the answer."""

    fail_every: int = 0
    changes: int = 0
    nodes: dict[int, Node] = field(default_factory=lambda: {1: Node(1, {})})
    """Never forgotten: what is deleted may still be open."""
    writing: dict[int, tuple[Node, bytearray]] = field(default_factory=dict)
    handles: int = 0

    def answer(self, opcode: int, at: int, body: bytes) -> bytes:
        """One request."""
        if opcode in _CHANGING or (opcode == _FLUSH and struct.unpack_from("<Q", body)[0] in self.writing):
            self.changes += 1
            if self.fail_every and self.changes % self.fail_every == 0:
                raise Refused(errno.EIO)
        act = _REQUESTS.get(opcode)
        if act is None:
            raise Refused(errno.ENOSYS)
        return act(self, self.nodes[at] if at else Node(0), body)

    def init(self, node: Node, body: bytes) -> bytes:
        major, minor, ahead = struct.unpack_from("<III", body)
        return struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), ahead, 0, 16, 12, _MAX_WRITE, 1, 0, 0, 0)

    def _child(self, node: Node, name: bytes) -> tuple[dict[str, Node], str]:
        if node.names is None:
            raise Refused(errno.ENOTDIR)
        return node.names, os.fsdecode(name.rstrip(b"\0"))

    def _made(self, node: Node, name: bytes, names: dict[str, Node] | None) -> Node:
        here, word = self._child(node, name)
        if word in here:
            raise Refused(errno.EEXIST)
        made = here[word] = Node(len(self.nodes) + 1, names)
        self.nodes[made.number] = made
        return made

    @staticmethod
    def _entry(node: Node) -> bytes:
        return struct.pack("<QQQQII", node.number, 0, 0, 0, 0, 0) + node.attributes

    def lookup(self, node: Node, body: bytes) -> bytes:
        here, name = self._child(node, body)
        if name not in here:
            raise Refused(errno.ENOENT)
        return self._entry(here[name])

    def getattr(self, node: Node, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + node.attributes

    def setattr(self, node: Node, body: bytes) -> bytes:
        if struct.unpack_from("<I", body)[0] & _SIZE:
            raise Refused(errno.EOPNOTSUPP)
        return self.getattr(node, body)

    def mkdir(self, node: Node, body: bytes) -> bytes:
        return self._entry(self._made(node, body[8:], {}))

    def unlink(self, node: Node, body: bytes) -> bytes:
        here, name = self._child(node, body)
        if name not in here:
            raise Refused(errno.ENOENT)
        del here[name]
        return b""

    def rmdir(self, node: Node, body: bytes) -> bytes:
        here, name = self._child(node, body)
        if here[name].names:
            raise Refused(errno.ENOTEMPTY)
        return self.unlink(node, body)

    def refuse(self, node: Node, body: bytes) -> bytes:
        raise Refused(errno.EOPNOTSUPP)

    def refuse_sync(self, node: Node, body: bytes) -> bytes:
        raise Refused(errno.EINVAL)

    def nothing(self, node: Node, body: bytes) -> bytes:
        return b""

    def open(self, node: Node, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0]
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise Refused(errno.EPERM)
        return _OPENED.pack(0, _DIRECT_IO, 0)

    def create(self, node: Node, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0]
        if flags & os.O_ACCMODE != os.O_WRONLY or flags & (os.O_APPEND | os.O_DIRECT):
            raise Refused(errno.EOPNOTSUPP)
        made = self._made(node, body[16:], None)
        self.handles += 1
        self.writing[self.handles] = (made, bytearray())
        return self._entry(made) + _OPENED.pack(self.handles, _DIRECT_IO, 0)

    def read(self, node: Node, body: bytes) -> bytes:
        _, at, size = struct.unpack_from("<QQI", body)
        return node.content[at : at + size]

    def write(self, node: Node, body: bytes) -> bytes:
        handle, at, size = struct.unpack_from("<QQI", body)
        _, written = self.writing[handle]
        if at != len(written):
            raise Refused(errno.EOPNOTSUPP)
        written += body[40 : 40 + size]
        return struct.pack("<II", size, 0)

    def flush(self, node: Node, body: bytes) -> bytes:
        found = self.writing.get(struct.unpack_from("<Q", body)[0])
        if found is not None:
            found[0].content = bytes(found[1])
        return b""

    def release(self, node: Node, body: bytes) -> bytes:
        self.writing.pop(struct.unpack_from("<Q", body)[0], None)
        return b""

    def opendir(self, node: Node, body: bytes) -> bytes:
        return _OPENED.pack(0, 0, 0)

    def readdir(self, node: Node, body: bytes) -> bytes:
        _, at, size = struct.unpack_from("<QQI", body)
        found = b""
        for number, (word, child) in enumerate(list((node.names or {}).items())[at:], at + 1):
            name = os.fsencode(word)
            one = struct.pack("<QQII", child.number, number, len(name), 4 if child.names is not None else 8) + name
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found

    def statfs(self, node: Node, body: bytes) -> bytes:
        return struct.pack("<QQQQQIIII24x", 1 << 30, 1 << 30, 1 << 30, 1 << 20, 1 << 20, 4096, 255, 4096, 0)


_REQUESTS = {
    1: Volume.lookup, 3: Volume.getattr, 4: Volume.setattr, 6: Volume.refuse, 8: Volume.refuse, 9: Volume.mkdir, 10: Volume.unlink,
    11: Volume.rmdir, 12: Volume.refuse, 13: Volume.refuse, 14: Volume.open, 15: Volume.read, 16: Volume.write, 17: Volume.statfs,
    18: Volume.release, 20: Volume.flush, 25: Volume.flush, 26: Volume.init, 27: Volume.opendir, 28: Volume.readdir, 29: Volume.nothing,
    30: Volume.refuse_sync, 34: Volume.nothing, 35: Volume.create, 45: Volume.refuse,
}  # fmt: skip


def main(folder: str, fail_every: int) -> None:
    """Mount, and serve until nobody needs it any more."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc, point = ctypes.CDLL(None, use_errno=True), os.fsencode(folder)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"volume", point, b"fuse.volume", 0, options.encode()):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    volume = Volume(fail_every)
    try:
        print("mounted", flush=True)
        while True:
            ready, _, _ = select.select([device, sys.stdin], [], [])
            if sys.stdin in ready:
                break
            _serve(volume, device)
    finally:
        libc.umount2(point, _DETACHED)


def _serve(volume: Volume, device: int) -> None:
    request = os.read(device, _MAX_WRITE + (1 << 16))
    _, opcode, unique, at, *_ = _HEAD.unpack_from(request)
    if opcode in _NO_ANSWER:
        return
    try:
        error, answer = 0, volume.answer(opcode, at, request[_HEAD.size :])
    except Refused as e:
        error, answer = int(e.args[0]), b""
    with suppress(FileNotFoundError):  # whoever asked was killed
        os.write(device, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
