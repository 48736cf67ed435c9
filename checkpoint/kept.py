"""Where a snapshot is kept that storage across the network did not take: on this node's disk, until a newer one is durable."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from .catalogue import found_in, remove
from .places import Where
from .storage import Disk
from .url import Url


def kept_directory(url: Url, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for what belongs to this address: under the run directories' home."""
    home = environ.get("GOODRUN_HOME")
    if not home:
        state = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
        home = os.path.join(state, "goodrun")
    return Path(home) / "kept" / hashlib.sha256(str(url).encode()).hexdigest()[:16]


def upload_command(path: Where, url: Url) -> str:
    """What to type when storage is well again."""
    return f"goodrun checkpoints upload {shlex.quote(str(path))} {shlex.quote(str(url))}"


def forget(place: Where, step: int) -> None:
    """A newer one is durable, or kept: what was kept has had its time."""
    if not isinstance(place, Url):
        return
    directory = kept_directory(place)
    for found in found_in(directory):
        if found.step <= step:
            remove(found.path, Disk())
