"""Unity Catalog volumes that are not mounted: the Files API, by way of the databricks-sdk, which finds host and credentials itself."""

from __future__ import annotations

import io
import logging
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from databricks.sdk import WorkspaceClient
from databricks.sdk.core import Config
from databricks.sdk.errors import NotFound

from .bucket import Item
from .trouble import scrubbed
from .windows import Windows

_LONGEST_S = 0.25
"""The SDK pauses for so long by itself before it tries again; then whoever calls decides."""
_PAGE = 1000


class _Brisk:
    """The SDK's clock."""

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, _LONGEST_S))


class _Scrubbing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = scrubbed(record.getMessage()), ()
        return True


logging.getLogger("databricks.sdk").addFilter(_Scrubbing())  # it repeats what a server answers


class Volumes:
    """One workspace client. It cuts large files into parts itself, and asks for their addresses again where they have expired."""

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self._client: WorkspaceClient | None = None

    def _files(self) -> Any:
        if self._client is None:
            config = Config(retry_timeout_seconds=1, http_timeout_seconds=60, clock=_Brisk())
            self._client = WorkspaceClient(config=config)
        return self._client.files

    def _do(self, method: str, path: str, **words: Any) -> Any:
        self._files()
        assert self._client is not None
        return self._client.api_client.do(method, path, **words)

    def renew(self) -> None:
        """A new client reads its configuration anew."""
        self._client = None

    def put(self, key: str, data: Windows) -> None:
        """One file, in parallel parts if it is large."""
        self._files().upload(key, io.BufferedReader(data.again()), overwrite=True)

    def get(self, key: str, at: int, length: int | None) -> bytes:
        """A range in one request; the whole as the SDK does it."""
        if length is None and at == 0:
            return bytes(self._files().download(key).contents.read())
        span = f"bytes={at}-{'' if length is None else at + length - 1}"
        answer = self._do("GET", f"/api/2.0/fs/files{quote(key)}", headers={"Range": span, "Accept": "application/octet-stream"}, raw=True)
        with answer["contents"] as body:
            return bytes(body.read())

    def page(self, prefix: str, token: str, *, deep: bool) -> tuple[list[Item], str]:
        """One request for the names in a directory; with `deep` as many as there are directories."""
        query: dict[str, Any] = {"page_size": _PAGE}
        if token:
            query["page_token"] = token
        path = f"/api/2.0/fs/directories{quote(prefix.rstrip('/'))}"
        answer = self._do("GET", path, query=query, headers={"Accept": "application/json"})
        items: list[Item] = []
        for found in answer.get("contents", []):
            whole = found["path"].rstrip("/")
            folder = bool(found.get("is_directory"))
            if folder and deep:
                items += self._below(whole + "/")
            items.append(Item(whole if deep else whole.rpartition("/")[2], None if folder else int(found.get("file_size", 0))))
        return items, answer.get("next_page_token") or ""

    def _below(self, prefix: str) -> list[Item]:
        found, token = self.page(prefix, "", deep=True)
        while token:
            more, token = self.page(prefix, token, deep=True)
            found += more
        return found

    def delete(self, key: str) -> None:
        """One request."""
        with suppress(NotFound):
            self._files().delete(key)

    def make_directory(self, key: str) -> None:
        """A directory and its parents."""
        self._files().create_directory(key)

    def remove_directory(self, key: str) -> None:
        """An empty directory."""
        with suppress(NotFound):
            self._files().delete_directory(key)
