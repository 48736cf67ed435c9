"""The server of the Files API that our tests use is one that the real databricks-sdk takes for real."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import pytest

from .far import Fault, FilesApi

sdk = pytest.importorskip("databricks.sdk")
errors = pytest.importorskip("databricks.sdk.errors")


@pytest.fixture
def server() -> Iterator[FilesApi]:
    """A volume."""
    with FilesApi().serving() as found:
        assert isinstance(found, FilesApi)
        yield found


@pytest.fixture
def files(server: FilesApi) -> Any:
    """The real client."""
    return sdk.WorkspaceClient(host=server.url, token=server.token, auth_type="pat").files


def test_every_row_of_the_protocol(server: FilesApi, files: Any) -> None:
    """Upload, refusal to overwrite, download, metadata, listing in pages, directories and deletion."""
    root = server.volume
    files.create_directory(f"{root}/a b/c")
    files.upload(f"{root}/a b/c/x", io.BytesIO(b"one"), overwrite=True)
    with pytest.raises(errors.AlreadyExists):
        files.upload(f"{root}/a b/c/x", io.BytesIO(b"two"), overwrite=False)
    assert files.download(f"{root}/a b/c/x").contents.read() == b"one"
    assert files.get_metadata(f"{root}/a b/c/x").content_length == 3
    files.upload(f"{root}/a b/c/empty", io.BytesIO(b""), overwrite=True)
    for n in range(5):
        files.upload(f"{root}/a b/{n}", io.BytesIO(bytes(n)), overwrite=True)
    server.plan.page = 2
    assert {f.name: f.file_size for f in files.list_directory_contents(f"{root}/a b")} == {"c": None, **{str(n): n for n in range(5)}}
    with pytest.raises(errors.NotFound):
        files.get_metadata(f"{root}/nothing")
    with pytest.raises(errors.BadRequest):
        files.delete_directory(f"{root}/a b/c")
    for name in ("x", "empty"):
        files.delete(f"{root}/a b/c/{name}")
    files.delete_directory(f"{root}/a b/c")
    with pytest.raises(errors.NotFound):
        files.get_directory_metadata(f"{root}/a b/c")
    with pytest.raises(errors.NotFound):
        files.upload(f"{root}/no/directory", io.BytesIO(b""), overwrite=True)


def test_parts(server: FilesApi, files: Any) -> None:
    """A large file goes in parts to signed addresses, which are asked for again when they have expired, and after a part was cut."""
    content = os.urandom(60 << 20)
    server.expiring = 2
    server.plan.faults = [Fault(lambda method, path: "/signed/part" in path, cut=1 << 20, times=1)]
    files.upload(f"{server.volume}/big", io.BytesIO(content), overwrite=True)
    assert server.files[f"{server.volume}/big"] == content
    statuses = [status for _, path, status in server.log if path.startswith("/signed/")]
    assert statuses.count(403) == 2
    assert statuses.count("cut") == 1
    assert files.download(f"{server.volume}/big").contents.read() == content


def test_token(server: FilesApi) -> None:
    """Another token is refused."""
    with pytest.raises(errors.Unauthenticated):
        sdk.WorkspaceClient(host=server.url, token="another", auth_type="pat").files.delete(f"{server.volume}/x")
