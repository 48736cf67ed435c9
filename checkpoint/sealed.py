"""One connection between two nodes of a job: both sides prove that they know its secret, then every frame is counted and sealed.

The accepting side speaks first. A client's proof holds for this connection alone (both sides add random bytes), and a frame for its place
in it alone, so nothing that was overheard can be said again. Nothing is kept secret: what is said may be read, not changed.
Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Iterator

MAGIC = b"goodrun1"
_NONCE = 16
_SEAL = 16
_HEAD = 4
_LARGEST = 4 << 20
_CHUNK = 1 << 16


class Broken(Exception):
    """The connection is of no more use. `ended`: the other process closed it, or its kernel said that there is none."""

    def __init__(self, why: str, *, ended: bool = False) -> None:
        super().__init__(why)
        self.ended = ended


def job_key(secret: str, run_id: str) -> bytes:
    """What a job's connections are sealed with. Without a secret it keeps strays and other jobs out, and nobody who knows the run's id."""
    return hmac.digest(secret.encode(), MAGIC + run_id.encode(), "sha256")


def keepers_key(key: bytes) -> bytes:
    """What the connections between a job's keepers are sealed with: what is said to one of them is of no use at an agent's port."""
    return hmac.digest(key, b"keepers", "sha256")


class Connection:
    """Bytes in, messages out, and back. Non-blocking; the owner watches `sock`."""

    def __init__(self, sock: socket.socket, key: bytes, *, accepted: bool) -> None:
        self.sock = sock
        self.trusted = False
        """Whether the other side has proved that it belongs to the job."""
        self.closing = False
        self._key = key
        self._accepted = accepted
        self._ours = secrets.token_bytes(_NONCE)
        self._session = b""
        self._in = bytearray()
        self._out = bytearray()
        self._count_in = self._count_out = 0
        if accepted:
            self._out += MAGIC + self._ours

    @property
    def waits_to_write(self) -> bool:
        """Whether there is something to be sent."""
        return bool(self._out)

    def send(self, body: bytes) -> None:
        """Put a message in line; only once the other side is trusted."""
        if len(self._out) > _LARGEST:
            raise Broken("the other side does not read")
        self._out += len(body).to_bytes(_HEAD, "big") + self._seal(b"a" if self._accepted else b"c", self._count_out, body)
        self._out += body
        self._count_out += 1

    def flush(self) -> None:
        """Send what can be sent."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as e:
            raise Broken(e.strerror or "write failed", ended=isinstance(e, (BrokenPipeError, ConnectionResetError))) from e

    def receive(self) -> Iterator[bytes]:
        """Read what has come; each whole message."""
        end: Broken | None = None
        try:
            while data := self.sock.recv(_CHUNK):
                self._in += data
                if len(self._in) > (_LARGEST if self.trusted else _CHUNK):
                    break  # the rest waits in the kernel until this has been taken
            else:
                end = Broken("closed by the other side", ended=True)
        except BlockingIOError:
            pass
        except OSError as e:
            end = Broken(e.strerror or "read failed", ended=isinstance(e, ConnectionResetError))
        yield from self._messages()
        if end is not None:
            raise end

    def _messages(self) -> Iterator[bytes]:
        if not self.trusted and not self._greet():
            return
        while len(self._in) >= _HEAD + _SEAL:
            length = int.from_bytes(self._in[:_HEAD], "big")
            if length > _LARGEST:
                raise Broken("a frame too long")
            end = _HEAD + _SEAL + length
            if len(self._in) < end:
                return
            with memoryview(self._in) as view:
                seal, body = bytes(view[_HEAD : _HEAD + _SEAL]), bytes(view[_HEAD + _SEAL : end])
            if not hmac.compare_digest(seal, self._seal(b"c" if self._accepted else b"a", self._count_in, body)):
                raise Broken("a frame with a wrong seal")
            self._count_in += 1
            del self._in[:end]
            yield body

    def _greet(self) -> bool:
        """Take the handshake one step on; True once the other side has proved itself."""
        if self._accepted:
            return self._greet_client()
        if not self._session:
            if not MAGIC.startswith(bytes(self._in[: len(MAGIC)])):
                raise Broken("what listens there is not goodrun's")
            if len(self._in) < len(MAGIC) + _NONCE:
                return False
            theirs = self._take(len(MAGIC) + _NONCE)[len(MAGIC) :]
            self._agree(theirs, self._ours)
            self._out += self._ours + self._proof(b"client")
        if len(self._in) < _SEAL:
            return False
        if not hmac.compare_digest(self._take(_SEAL), self._proof(b"server")):
            raise Broken("it does not know the job's secret")
        self.trusted = True
        return True

    def _greet_client(self) -> bool:
        if len(self._in) < _NONCE + _SEAL:
            return False
        self._agree(self._ours, self._take(_NONCE))
        if not hmac.compare_digest(self._take(_SEAL), self._proof(b"client")):
            raise Broken("it does not know the job's secret")
        self._out += self._proof(b"server")
        self.trusted = True
        return True

    def _agree(self, acceptor: bytes, client: bytes) -> None:
        self._session = hmac.digest(self._key, b"session" + acceptor + client, "sha256")

    def _proof(self, who: bytes) -> bytes:
        return hmac.digest(self._session, who, "sha256")[:_SEAL]

    def _seal(self, who: bytes, count: int, body: bytes) -> bytes:
        seal = hashlib.blake2b(who + count.to_bytes(8, "big"), key=self._session, digest_size=_SEAL)
        seal.update(body)
        return seal.digest()

    def _take(self, n: int) -> bytes:
        taken = bytes(self._in[:n])
        del self._in[:n]
        return taken
