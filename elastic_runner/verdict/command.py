"""`goodrun verdict`: the verdict on a rehearsal that was played before, or on any two takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import GoodrunError
from .judging import as_dict, as_text, judge
from .takes import Take


def main(argv: Sequence[str]) -> int:
    """`goodrun verdict DIR [--quiet-run DIR] [--json]`; the status is 0 for PASS, 1 for FAIL, 2 where there is nothing to judge."""
    parser = argparse.ArgumentParser(prog="goodrun verdict", description="Say again what a rehearsal (--chaos-verdict) came to.")
    parser.add_argument("rehearsal", type=Path, metavar="DIR", help="what was given as --run-dir, or the folder that was printed")
    parser.add_argument("--quiet-run", type=Path, metavar="DIR", help="compare with this quiet take (default: DIR/quiet)")
    parser.add_argument("--min-goodput", type=float, default=0.0, metavar="SHARE", help="fail below this share of the quiet take's goodput")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    args = parser.parse_args(argv)
    try:
        verdict = judge(Take.load(args.quiet_run or args.rehearsal / "quiet"), Take.load(args.rehearsal / "chaos"), args.min_goodput)
    except (GoodrunError, OSError) as e:
        print(f"goodrun verdict: {e}", file=sys.stderr)
        return 2
    print(json.dumps(as_dict(verdict), indent=2) if args.json else as_text(verdict), end="\n" if args.json else "")
    return 0 if verdict.passed else 1
