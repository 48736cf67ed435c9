"""Servers on loopback that stand for storage across the network, each with a plan of what goes wrong.

The one of the Files API keeps files in memory, and follows what the real client sends and expects; the one before S3 hands every request
on to a real S3 server. `log` is what the tests look at.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

_BLOCK = 1 << 16


@dataclass
class Fault:
    """What becomes of the requests that `of` picks: `times` of them, or all until it is taken out of the plan."""

    of: Callable[[str, str], bool] = lambda method, path: True
    status: int = 0
    retry_after: str = ""
    cut: int = -1
    """The connection breaks after so many bytes of the body, the request's if it has one."""
    times: int = -1
    body: bytes = b""


@dataclass
class Plan:
    """What goes wrong."""

    faults: list[Fault] = field(default_factory=list)
    latency_s: float = 0.0
    connection_rate: float = 0.0
    """Bytes a second that one connection carries; 0 is no limit."""
    total_rate: float = 0.0
    """Bytes a second that all connections carry together."""
    page: int = 1000
    holes: bool = False
    """A listing begins with a page that holds nothing, and yet there are more."""
    stale: set[str] = field(default_factory=set)
    """Names that listings do not have yet."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0

    def meets(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.of(method, path):
                    fault.times -= 1
                    return fault
        return None

    def carried(self, begin: float, done: int, nbytes: int) -> None:
        """Wait as long as it takes until a connection has carried the last `nbytes` of `done` since `begin`."""
        until = begin + done / self.connection_rate if self.connection_rate else 0.0
        if self.total_rate:
            with self.lock:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.total_rate
                until = max(until, self._free_at)
        time.sleep(max(0.0, until - time.monotonic()))


_HOLE = "nothing-here-yet"
"""The token after a page that holds nothing."""


class Far(BaseHTTPRequestHandler):
    """One connection. `answer` is what it is all about; faults come before it."""

    protocol_version = "HTTP/1.1"
    server: Server
    wbufsize = -1
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        plan = self.server.plan
        fault = plan.meets(self.command, self.path)
        time.sleep(plan.latency_s)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.cut >= 0 and length:
            self.rfile.read(min(fault.cut, length))
            self._note("cut")
            self.close_connection = True
            self.connection.close()
            return
        body = self._read(length)
        if fault is not None and fault.status:
            self.reply(fault.status, fault.body, {"Retry-After": fault.retry_after} if fault.retry_after else {})
            return
        self._cut = fault.cut if fault is not None else -1
        self.answer(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve
    _cut = -1

    def answer(self, body: bytes) -> None:
        """What the server does."""
        raise NotImplementedError

    def handle_expect_100(self) -> bool:
        """Go on: S3's clients ask before they send."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _read(self, length: int) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        parts, begin, done = [], time.monotonic(), 0
        while done < length:
            block = self.rfile.read(min(_BLOCK, length - done))
            if not block:
                raise ConnectionError
            parts.append(block)
            done += len(block)
            self.server.plan.carried(begin, done, len(block))
        return b"".join(parts)

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send an answer, or as much of it as the fault lets through."""
        self._note(status)
        self.send_response_only(status)
        sized = {"Content-Length": str(len(body))} | (headers or {})
        for name, value in sized.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut, self._cut = self._cut, -1
        if 0 <= cut < len(body):
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.close_connection = True
            return
        begin = time.monotonic()
        for at in range(0, len(body), _BLOCK):
            block = body[at : at + _BLOCK]
            self.wfile.write(block)
            self.server.plan.carried(begin, at + len(block), len(block))
        self.wfile.flush()

    def _note(self, status: object) -> None:
        self.server.log.append((self.command, unquote(self.path), status))

    def log_message(self, *args: object) -> None:
        """Not on stderr."""


class Server(ThreadingHTTPServer):
    """A server in threads of this process, on a port of its own."""

    daemon_threads = True
    request_queue_size = 128
    handler: ClassVar[type[Far]] = Far

    def __init__(self) -> None:
        """Not serving yet."""
        super().__init__(("127.0.0.1", 0), self.handler)
        self.plan = Plan()
        self.log: list[tuple[str, str, object]] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is none of ours."""

    @contextmanager
    def serving(self) -> Iterator[Server]:
        """Serve until the end of the block."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def asked(self, *methods: str) -> list[str]:
        """The paths that were asked for with these methods."""
        return [path for method, path, _ in self.log if method in methods]


_S3_HOLE = f"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{_HOLE}</NextContinuationToken></ListBucketResult>"


class _Between(Far):
    server: Between

    def answer(self, body: bytes) -> None:
        """Hand it on."""
        listing, plan = self.command == "GET" and "list-type=2" in self.path, self.server.plan
        if listing and plan.holes and "continuation-token=" not in self.path:
            self.reply(200, _S3_HOLE.encode(), {"Content-Type": "application/xml"})
            return
        asked = self.path.replace(f"continuation-token={_HOLE}", "") + f"&max-keys={plan.page}" if listing else self.path
        onward = http.client.HTTPConnection(self.server.target, timeout=60)
        own = ("connection", "transfer-encoding", "content-length", "expect")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in own}
        onward.request(self.command, asked, body=body or None, headers=headers | {"Content-Length": str(len(body))})
        got = onward.getresponse()
        content = got.read()
        for name in plan.stale if listing else ():
            content = re.sub(rf"<(Contents|CommonPrefixes)>(?:(?!</\1>).)*{name}.*?</\1>".encode(), b"", content, flags=re.DOTALL)
        dropped = ("connection", "transfer-encoding", "content-length", "date", "server")
        back = {k: v for k, v in got.getheaders() if k.lower() not in dropped}
        if self.command == "HEAD":
            back["Content-Length"] = got.getheader("Content-Length") or "0"
        self.reply(got.status, content, back)
        onward.close()


class Between(Server):
    """Stands before an S3 server."""

    handler = _Between

    def __init__(self, target: str) -> None:
        """`target` is that server's host and port."""
        super().__init__()
        self.target = target


class _FilesApi(Far):
    server: FilesApi

    def answer(self, body: bytes) -> None:
        """Route."""
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        if url.path.startswith("/signed/"):
            self._signed(url.path, query, body)
            return
        if not url.path.startswith("/api/"):
            self._error(404, "NOT_FOUND", "no such page")
            return
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._error(401, "UNAUTHENTICATED", f"the token {self.headers.get('Authorization')} is not valid")
            return
        kind = url.path.removeprefix("/api/2.0/fs/").split("/")[0]
        if kind == "create-upload-part-urls":
            self._part_addresses(json.loads(body))
            return
        path = query["path"] if kind == "create-download-url" else "/".join(map(unquote, url.path.split("/")[5:]))
        path = "/" + path.strip("/")
        if not path.startswith("/Volumes/") or len(path.split("/")) < 5:
            self._error(400, "INVALID_PARAMETER_VALUE", f"{path} is not in a volume")
            return
        if kind == "create-download-url":
            self._download_address(path)
        else:
            getattr(self, f"_{self.command.lower()}_{kind}")(path, query, body)

    def _error(self, status: int, code: str, message: str) -> None:
        self.reply(status, json.dumps({"error_code": code, "message": message}).encode(), {"Content-Type": "application/json"})

    def _json(self, what: object) -> None:
        self.reply(200, json.dumps(what).encode(), {"Content-Type": "application/json"})

    # -- files ---------------------------------------------------------------------------------------------------------

    def _put_files(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path in self.server.files and query.get("overwrite") != "true":
            self._error(409, "ALREADY_EXISTS", f"{path} exists")
        elif path.rpartition("/")[0] not in self.server.folders:
            self._error(404, "NOT_FOUND", f"there is no directory for {path}")
        else:
            self.server.files[path] = body
            self.reply(204)

    def _get_files(self, path: str, query: dict[str, str], body: bytes) -> None:
        content = self.server.files.get(path)
        if content is None:
            self._error(404, "NOT_FOUND", f"there is no {path}")
            return
        head = {"Content-Type": "application/octet-stream", "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"}
        span = self.headers.get("Range")
        if not span:
            self.reply(200, content, head)
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else len(content), len(content))
        if begin >= len(content):
            self._error(416, "INVALID_RANGE", "beyond the end")
            return
        self.reply(206, content[begin:end], head | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"})

    def _head_files(self, path: str, query: dict[str, str], body: bytes) -> None:
        content = self.server.files.get(path)
        if content is None:
            self.reply(404)
        else:
            self.reply(200, b"", {"Content-Length": str(len(content)), "Content-Type": "application/octet-stream"})

    def _delete_files(self, path: str, query: dict[str, str], body: bytes) -> None:
        if self.server.files.pop(path, None) is None:
            self._error(404, "NOT_FOUND", f"there is no {path}")
        else:
            self.reply(204)

    def _post_files(self, path: str, query: dict[str, str], body: bytes) -> None:
        action, uploads = query["action"], self.server.uploads
        if action == "initiate-upload":
            uploads[token := uuid.uuid4().hex] = {}
            self._json({"multipart_upload": {"session_token": token}})
        elif action == "complete-upload":
            parts = uploads.pop(query["session_token"])
            wanted = [p["part_number"] for p in json.loads(body)["parts"]]
            self.server.files[path] = b"".join(parts[number] for number in wanted)
            self._json({})
        else:
            uploads.pop(query["session_token"], None)
            self._json({})

    # -- addresses without a token -------------------------------------------------------------------------------------

    def _sign(self, kind: str, what: str) -> str:
        sign = uuid.uuid4().hex
        self.server.signed[sign] = (kind, what)
        return f"{self.server.url}/signed/{kind}?signature={sign}"

    def _part_addresses(self, asked: dict[str, Any]) -> None:
        numbers = range(asked["start_part_number"], asked["start_part_number"] + asked["count"])
        urls = [{"part_number": n, "url": self._sign("part", f"{asked['session_token']}/{n}"), "headers": []} for n in numbers]
        self._json({"upload_part_urls": urls})

    def _download_address(self, path: str) -> None:
        if path in self.server.files:
            self._json({"url": self._sign("get", path), "headers": []})
        else:
            self._error(404, "NOT_FOUND", f"there is no {path}")

    def _signed(self, path: str, query: dict[str, str], body: bytes) -> None:
        assert "Authorization" not in self.headers, "a signed address must not be given the token"
        kind, what = self.server.signed[query["signature"]]
        if self.server.expiring > 0:
            self.server.expiring -= 1
            del self.server.signed[query["signature"]]
            self.reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        elif kind == "get":
            self._get_files(what, {}, b"")
        else:
            upload, _, number = what.partition("/")
            self.server.uploads[upload][int(number)] = body
            self.reply(200, b"", {"ETag": f'"{upload[:6]}-{number}"'})

    # -- directories ---------------------------------------------------------------------------------------------------

    def _put_directories(self, path: str, query: dict[str, str], body: bytes) -> None:
        parts = path.split("/")
        self.server.folders |= {"/".join(parts[:n]) for n in range(5, len(parts) + 1)}
        self.reply(204)

    def _head_directories(self, path: str, query: dict[str, str], body: bytes) -> None:
        self.reply(200 if path in self.server.folders else 404)

    def _get_directories(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path not in self.server.folders:
            self._error(404, "NOT_FOUND", f"there is no directory {path}")
            return
        found: list[dict[str, Any]] = [{"path": f, "name": f.rpartition("/")[2], "is_directory": True} for f in self.server.folders]
        for name, content in list(self.server.files.items()):
            entry = {"path": name, "name": name.rpartition("/")[2], "is_directory": False}
            found.append(entry | {"file_size": len(content), "last_modified": 1})
        here = sorted((f for f in found if f["path"].rpartition("/")[0] == path), key=lambda f: f["path"])
        here = [f for f in here if f["name"] not in self.server.plan.stale]
        size, token = min(int(query.get("page_size", 1000)), self.server.plan.page), query.get("page_token", "")
        if self.server.plan.holes and not token:
            self._json({"next_page_token": _HOLE})
            return
        begin = int(token) if token.isdigit() else 0
        answer: dict[str, Any] = {"contents": here[begin : begin + size]}
        if begin + size < len(here):
            answer["next_page_token"] = str(begin + size)
        self._json(answer)

    def _delete_directories(self, path: str, query: dict[str, str], body: bytes) -> None:
        inside = [p for p in (*self.server.files, *self.server.folders) if p.startswith(path + "/")]
        if inside:
            self._error(400, "DIRECTORY_NOT_EMPTY", f"{path} is not empty")
        elif path not in self.server.folders:
            self._error(404, "NOT_FOUND", f"there is no directory {path}")
        else:
            self.server.folders.discard(path)
            self.reply(204)


class FilesApi(Server):
    """Unity Catalog volumes over the Files API; one volume, /Volumes/main/default/ckpt, is there from the start."""

    handler = _FilesApi
    volume = "/Volumes/main/default/ckpt"

    def __init__(self) -> None:
        """An empty volume."""
        super().__init__()
        self.token = "dapi-" + uuid.uuid4().hex
        self.files: dict[str, bytes] = {}
        self.folders = {self.volume}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.signed: dict[str, tuple[str, str]] = {}
        self.expiring = 0
        """How many signed addresses are going to have expired when they are used."""
