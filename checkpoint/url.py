"""A place on an object store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Url:
    """An address such as s3://bucket/run, or a volume's path where no mount has it. A path's few words, and none that touch files."""

    text: str

    def __truediv__(self, name: str) -> Url:
        """What lies under it."""
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        """As the user wrote it."""
        return self.text

    @property
    def name(self) -> str:
        """The last part."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """Without the last part."""
        return Url(self.text.rpartition("/")[0])
