"""`--chaos-verdict`: plays the job twice, without and with its chaos, and says whether that made a difference."""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from .. import runs
from ..errors import UsageError
from ..options import RunConfig, build_parser, split_at_script
from ..signals import Signals
from .judging import as_dict, as_text, judge
from .takes import Take, perform

_TIMES_AS_LONG, _AND_S = 10.0, 600.0
"""What the take with chaos gets, measured by the quiet one: beyond that it hangs."""


def rehearse(argv: Sequence[str], config: RunConfig, signals: Signals, say: Callable[[str], None]) -> int:
    """Returns 0 for PASS, 1 for FAIL, 2 where the quiet take failed, so that there is nothing to compare with."""
    folder = _folder(config)
    head, script, tail = split_at_script(build_parser(), argv)

    def take(name: str, within_s: float, *options: str) -> Take:
        where = folder / name
        say(f"verdict: the {name} take; what it says is in {where}/output.txt")
        return perform([*head, "--no-chaos-verdict", "--run-dir", str(where / "run"), *options, "--", script, *tail], where, within_s)

    with signals.waiting("a rehearsal"):
        quiet = Take.load(config.quiet_take) if config.quiet_take is not None else take("quiet", 0.0, "--chaos", "")
        if quiet.status != 0:
            say(f"verdict: none, for the quiet take failed (status {quiet.status}); see {quiet.folder}/output.txt")
            return 2
        verdict = judge(quiet, take("chaos", _TIMES_AS_LONG * quiet.seconds + _AND_S), config.least_goodput)
    (folder / "verdict.json").write_text(json.dumps(as_dict(verdict), indent=2) + "\n")
    sys.stdout.write(json.dumps(as_dict(verdict), indent=2) + "\n" if config.verdict_as_json else as_text(verdict))
    sys.stdout.flush()
    return 0 if verdict.passed else 1


def _folder(config: RunConfig) -> Path:
    """Where the takes go: fresh, so that neither finds checkpoints of an earlier one."""
    if config.run_dir is not None:
        folder = config.run_dir.absolute()
    else:
        folder = runs.runs_home(os.environ) / f"{runs.new_run_id(datetime.now(), random.Random(secrets.randbits(64)))}-verdict"
    taken = [name for name in ("quiet", "chaos") if (folder / name).exists()]
    if taken:
        raise UsageError(f"{folder} holds a rehearsal already ({taken[0]}); name another folder with --run-dir")
    return folder
