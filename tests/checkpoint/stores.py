"""The stores that tests save to: a directory, a mount, a volume over the Files API; S3, GCS and Azure by servers of others, ours before."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from goodrun.checkpoint.places import Where, located
from goodrun.checkpoint.remote import bucket, objects

from .far import Between, FilesApi, Server

SECRET = "sEcReT-" + uuid.uuid4().hex


@dataclass
class Store:
    """Where a test saves to: `url` is what a Checkpointer is given, `server` where faults are planned (a directory has none)."""

    kind: str
    url: str
    server: Server | None = None
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> Where:
        """The same as goodrun has it."""
        return located(self.url)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def running(*command: str, **environ: str) -> Iterator[str]:
    """A server in a process of its own, started with `command` and the port it is to listen on; its host and port."""
    port = free_port()
    env = os.environ | environ
    process = subprocess.Popen([*command, str(port)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, f"{command} does not come up"
                time.sleep(0.05)  # nothing announces that it listens
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def moto() -> AbstractContextManager[str]:
    """moto's S3 server, which takes parts of 64 KiB."""
    command = (sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p")
    return running(*command, S3_UPLOAD_PART_MIN_SIZE="65536")


@contextmanager
def gcs(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Google Cloud Storage as its emulator has it, with faults before it."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    options = ("start", "--host", "127.0.0.1", "--in-memory", "--default-bucket", "bucket", "--port")
    with running(sys.executable, "-m", "gcp_storage_emulator", *options) as target, Between(target).serving() as server:
        words = {"STORAGE_EMULATOR_HOST": server.url, "FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        found = Store("gcs", "gs://bucket/some/run", server, words)
        _begin(found, patch)
        yield found
        _forget()


@contextmanager
def azure(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Azure's blobs as Azurite has them, with faults before it; its account and key are those that its documentation names."""
    pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob") or pytest.skip("azurite is not installed: npm install -g azurite")
    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent", "--blobHost", "127.0.0.1", "--blobPort")
    with running(program, *options) as target, Between(target).serving() as server:
        account, key = "devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
        words = f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};BlobEndpoint={server.url}/{account}"
        found = Store("azure", "abfs://bucket/some/run", server, {"AZURE_STORAGE_CONNECTION_STRING": words})
        _begin(found, patch)
        import fsspec

        fsspec.filesystem("abfs", skip_instance_cache=True).mkdir("bucket")
        yield found
        _forget()


@contextmanager
def s3(target: str, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket of its own, with faults before it."""
    pytest.importorskip("s3fs")
    with Between(target).serving() as server:
        found = Store("s3", f"s3://goodrun-{uuid.uuid4().hex}/some/run", server)
        found.environ = {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        _begin(found, patch)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(found.url.split("/")[2])
        server.log.clear()
        yield found
        _forget()


@contextmanager
def volume(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A volume that is not mounted."""
    pytest.importorskip("databricks.sdk")
    server = FilesApi()
    server.token = SECRET
    with server.serving():
        found = Store("volume", f"{server.volume}/some/run", server, {"DATABRICKS_HOST": server.url, "DATABRICKS_TOKEN": SECRET})
        _begin(found, patch)
        yield found
        _forget()


@contextmanager
def directory(folder: Path) -> Iterator[Store]:
    """A directory on the local disk."""
    yield Store("directory", str(folder / "ckpt"))


@contextmanager
def mount(folder: Path, fail_every: int = 0) -> Iterator[Store]:
    """A real file system in user space that refuses what mounted volumes refuse; see mounts.py."""
    if os.getuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("a file system in user space needs root and /dev/fuse")
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("mounts.py")), str(folder), str(fail_every)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        if server.stdout.readline() != "mounted\n":
            pytest.skip("mounting is not allowed here")
        yield Store("mount", str(folder / "run"))
    assert server.returncode == 0


def _begin(store: Store, patch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "DATABRICKS_"))]:
        patch.delenv(name)
    for name, value in store.environ.items():
        patch.setenv(name, value)
    _forget()


def _forget() -> None:
    """The next test's server is another one."""
    bucket.bucket_of.cache_clear()
    objects._persistence.cache_clear()
