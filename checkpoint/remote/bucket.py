"""What an object store has to be able to do, and which client speaks to which."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

from ..errors import CheckpointError
from .windows import Windows

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure", "/Volumes": "databricks"}


class Item(NamedTuple):
    """A name that a listing has: `size` is None for what has names under it."""

    name: str
    size: int | None


class Bucket(Protocol):
    """One client of one store. Each method is one request or a few, and raises what its library raises."""

    def put(self, key: str, data: Windows) -> None:
        """Put an object, which is there whole or not at all."""

    def get(self, key: str, at: int, length: int | None) -> bytes:
        """A range of an object."""

    def page(self, prefix: str, token: str, *, deep: bool) -> tuple[list[Item], str]:
        """Some of the names under a prefix, and a token for more, or nothing. `deep` gives objects at any depth, by their whole keys."""

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""

    def make_directory(self, key: str) -> None:
        """What it takes before objects can be put under this key."""

    def remove_directory(self, key: str) -> None:
        """What is left of a key under which nothing is any more."""

    def renew(self) -> None:
        """Look for fresh credentials."""


@runtime_checkable
class Multipart(Bucket, Protocol):
    """A store that takes an object in parts, several at once."""

    part_bytes: int

    def begin(self, key: str) -> str:
        """Begin an upload."""

    def put_part(self, key: str, upload: str, number: int, piece: list[memoryview]) -> str:
        """Put one part; its tag."""

    def complete(self, key: str, upload: str, tags: list[str]) -> None:
        """Now the object is there."""

    def abort(self, key: str, upload: str) -> None:
        """It will not be."""


@lru_cache(maxsize=16)
def bucket_of(scheme: str) -> Bucket:
    """The client for addresses of this scheme, one a process. Raises CheckpointError where something has to be installed first."""
    try:
        if scheme in ("s3", "s3a"):
            from .s3 import S3

            return S3()
        if scheme == "/Volumes":
            from .volumes import Volumes

            return Volumes()
        from .filesystem import Filesystem

        return Filesystem(scheme)
    except ImportError as e:
        extra = _EXTRAS.get(scheme)
        how = f"pip install 'goodrun[{extra}]'" if extra else "install its fsspec package"
        what = "volumes that are not mounted" if scheme == "/Volumes" else f"{scheme}:// addresses"
        raise CheckpointError(f"{what} need {e.name or 'a package that is missing'}: {how}") from None
    except ValueError:
        raise CheckpointError(f"{scheme}:// is no address that fsspec knows") from None
