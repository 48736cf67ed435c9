"""This attempt's claim on a checkpoint directory: looked at, taken, and the same on all ranks."""

from __future__ import annotations

import os
import time

from .. import progress
from .catalogue import check_directory
from .errors import StorageTrouble, StorageUnreachable
from .fence import Fence, Token, own_token
from .places import Where, hurried
from .ranks import Ranks
from .wire import ADDRESS_VARIABLE

_TRIES = 3
_PAUSE_S = 0.1


class Claim:
    """Made on all ranks alike.

    A later attempt of a run does not need storage that is down or cannot be written: a snapshot may be in the keeper's memory.
    """

    def __init__(self, directory: Where, ranks: Ranks) -> None:
        """Check that the directory can be ours, if no attempt before this one has; nothing is written."""
        token, self.given = own_token()
        self.again = self.given and token.generation > 0 and ADDRESS_VARIABLE in os.environ
        self._directory, self._ranks = directory, ranks
        self._fence = Fence(directory, token, given=self.given)
        self._agreed: Token | None = None
        self.hurry(self.again)
        if not self.again:
            ranks.from_first(lambda: check_directory(directory))

    def hurry(self, yes: bool) -> None:
        """Whether storage that is down is asked with little patience, for there may be no need of it."""
        hurried(self._directory, yes)

    def token(self) -> Token:
        """This attempt's token; claims the directory the first time."""
        if self._agreed is None:
            self._agreed = Token(*self._ranks.from_first(self._claim))
            if (page := progress.page()) is not None:
                page.run_started(self._agreed.started)
        return self._agreed

    def _claim(self) -> Token:
        for _ in range(_TRIES):
            try:
                return self._fence.claim()
            except StorageTrouble as e:  # it has been asked again already
                error: OSError = e
                break
            except OSError as e:  # a mounted volume fails now and then
                error = e
                time.sleep(_PAUSE_S)
        if not self.again:
            raise StorageUnreachable(f"{self._directory} cannot be claimed: {error.strerror}")
        return self._fence.token  # the keeper looks again before it writes
