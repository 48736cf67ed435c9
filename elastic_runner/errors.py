"""What goes wrong before or around a run, each with whose fault it is."""

from __future__ import annotations


class GoodrunError(Exception):
    """The base of goodrun's launcher errors."""


class UsageError(GoodrunError):
    """The command line, its configuration or its surroundings cannot work: the user's to mend; exit status 2."""


class SeamError(GoodrunError):
    """The installed torch lacks a name or parameter that goodrun leans on: install a supported torch."""
