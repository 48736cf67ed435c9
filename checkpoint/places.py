"""Where checkpoints may lie, and which storage is behind a place: a directory, a mounted volume, an object store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .mount import Mount, sequential_only
from .storage import Disk, Storage
from .url import Url

Where = Path | Url

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_SLASH_LOST = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")
"""What pathlib makes of an address."""
_VOLUME = re.compile(r"(/Volumes/[^/]+/[^/]+/[^/]+)(/.*)?")


def located(place: str | os.PathLike[str] | Url) -> Where:
    """The place that a user has named: a path, an fsspec URL, or a volume, which is a path where it is mounted."""
    if isinstance(place, Url):
        return place
    text = os.fspath(place)
    if _SCHEME.match(text):
        return _url(text)
    if lost := _SLASH_LOST.match(text):
        meant = f"{lost[0]}/{text[lost.end() :]}"
        raise CheckpointError(f"{text} is an address that has lost a slash, as in Path('{lost[0]}/…'): give {meant!r}, a str")
    volume = _VOLUME.fullmatch(text)
    if volume is not None and not os.path.isdir(volume[1]):
        return Url(text.rstrip("/"))
    return Path(text)


def _url(text: str) -> Where:
    scheme, _, rest = text.partition("://")
    if scheme in ("file", "local"):
        return Path("/" + rest.lstrip("/"))
    if "@" in rest.split("/")[0] and ":" in rest.split("@")[0]:
        raise CheckpointError(f"a {scheme}:// address must not hold a password: leave it in the environment or in a credentials file")
    if "?" in rest:
        raise CheckpointError(f"a {scheme}:// address must not hold a query: leave that in the environment or in a credentials file")
    return Url(f"{scheme}://{rest.rstrip('/')}")


def absolute(place: Where) -> Where:
    """The same place for a process in another directory."""
    return place if isinstance(place, Url) else Path(os.path.abspath(place))


def storage_at(place: Where, disk: Disk | None = None) -> Storage[Any]:
    """The storage behind a place. `disk` is the one for directories, whose seam all others' calls go by, too."""
    if isinstance(place, Url):
        from .remote.objects import Objects  # what object stores need is only wanted where there is one

        return Objects.at(place, None if disk is None else disk.call)
    if sequential_only(place):
        return Mount(None if disk is None else disk.call)
    return disk or Disk()


def hurried(place: Where, yes: bool) -> None:
    """Whether this process asks a storage across the network that is down with little patience, for something better waits."""
    if isinstance(place, Url):
        from .remote.objects import persistence_at

        persistence_at(place).hurried = yes
