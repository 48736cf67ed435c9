"""Ties a process to its supervisor's life; run as a script, becomes the program it is given.

Standard library only and no package around it: `python -S -E tied.py PARENT PROGRAM [ARGS…]` must start in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; leave at once if it is dead already. Survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as e:
        sys.exit(f"goodrun: cannot run {sys.argv[2]!r}: {e.strerror}")
