"""`--config FILE`: options by their long names in YAML, which the command line and PET_* variables overrule."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError


def apply_config_file(parser: argparse.ArgumentParser, head: Sequence[str]) -> None:
    """Take what the file of `--config` in `head` says as the parser's defaults. Raises UsageError, in one sentence."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(list(head))[0].config
    if path is None:
        return
    known = {a.dest: a for a in parser._actions if a.option_strings and a.dest not in ("help", "config")}
    for key, value in _read_yaml(path).items():
        dest = str(key).lstrip("-").replace("-", "_")
        if dest not in known:
            close = [d for d in known if d.startswith(dest[:4])]
            hint = f"; did you mean {close[0].replace('_', '-')!r}?" if close else ""
            raise UsageError(f"{path} has the unknown key {key!r}{hint}")
        if f"PET_{dest.upper()}" not in os.environ:
            parser.set_defaults(**{dest: _as_default(known[dest], value, f"{path}: {key}")})


def _as_default(action: argparse.Action, value: object, where: str) -> object:
    """A YAML value as the option's default, which argparse itself does not check."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} must be true or false, not {value!r}")
        return value
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)  # YAML takes these words for yes and no
    if action.choices is not None and text not in action.choices:
        raise UsageError(f"{where} must be one of {', '.join(map(str, action.choices))}, not {text!r}")
    return text


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        body = yaml.safe_load(path.read_text())
    except OSError as e:
        raise UsageError(f"cannot read --config {path}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"--config {path} is not valid YAML: {str(e).splitlines()[0]}") from e
    if not isinstance(body, dict):
        raise UsageError(f"--config {path} must hold options as `name: value` lines")
    return body
