"""`goodrun goodput`: where the time of a run went."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..merging import read_job
from ..runs import find_run, runs_home
from .account import Goodput, account
from .advice import advise

JSON_SCHEMA = 1


def goodput_as_dict(goodput: Goodput) -> dict[str, Any]:
    """The goodput in JSON's own types, with what to improve next."""
    advice = [asdict(item) for item in advise(goodput)]
    return {"schema": JSON_SCHEMA, **asdict(goodput), "groups": goodput.groups(), "advice": advice}


def main(argv: list[str]) -> int:
    """`goodrun goodput [RUN] [--json | --csv]`."""
    from ..reading import answered, drawn, parser_of_run

    parser = parser_of_run("goodput", "Say where the time of a run went: every slot-second in one bucket.", csv=True)
    args = parser.parse_args(argv)

    def answer() -> str:
        goodput = account(read_job(find_run(args.run, runs_home(os.environ), Path.cwd())))
        if args.json:
            return json.dumps(goodput_as_dict(goodput), indent=2) + "\n"
        from .view import goodput_csv, show_goodput  # rich is slow to import

        return goodput_csv(goodput) if args.csv else drawn(lambda console: show_goodput(goodput, console))

    return answered("goodput", answer)
