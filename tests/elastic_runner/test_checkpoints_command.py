"""`goodrun checkpoints`: list, verify, show, prune; and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from goodrun.checkpoint import DictCheckpoints
from goodrun.checkpoint.catalogue import found_in
from goodrun.elastic_runner.reading import checkpoints_main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with steps 5, 10 and 15."""
    checkpoints = DictCheckpoints(tmp_path / "ckpt")
    for step in (5, 10, 15):
        checkpoints.save({"w": torch.full((40, 30), float(step)), "step": step}, step).result()
    checkpoints.close()
    return tmp_path / "ckpt"


def answer(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> Any:
    """The command's JSON."""
    assert checkpoints_main([*map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_list_and_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are listed, newest first; damage shows when every byte is read, with status 1 and the file's name."""
    rows = answer(capsys, root)["checkpoints"]
    assert [(r["step"], r["whole"], r["world_size"]) for r in rows] == [(15, True, 1), (10, True, 1), (5, True, 1)]
    flip(found_in(root)[1].path / "__0_0.distcp")
    assert all(r["whole"] for r in answer(capsys, root)["checkpoints"])
    rows = answer(capsys, root, "--verify", status=1)["checkpoints"]
    assert [r["fault"] for r in rows] == [None, "__0_0.distcp does not match its checksum", None]
    assert checkpoints_main([str(root), "--verify"]) == 1
    assert "DAMAGED: __0_0.distcp does not match its checksum" in capsys.readouterr().out


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is in one, by step."""
    one = answer(capsys, root, "--show", 10)
    assert one["tensors"] == {"w": {"dtype": "float32", "shape": [40, 30], "parts": 1}}
    assert checkpoints_main([str(root), "--show", "11"]) == 2
    assert "no checkpoint of step 11" in capsys.readouterr().err


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest stay; nothing is deleted where the newest is damaged."""
    assert len(answer(capsys, root, "--prune", 2)["deleted"]) == 1
    assert [f.step for f in found_in(root)] == [15, 10]
    flip(found_in(root)[0].path / "values-0.json")
    assert checkpoints_main([str(root), "--prune", "1"]) == 2
    assert "nothing is deleted" in capsys.readouterr().err
    assert [f.step for f in found_in(root)] == [15, 10]


def test_it_is_quick(root: Path) -> None:
    """Listing checkpoints does not import torch."""
    code = (
        f"import sys; from goodrun.elastic_runner.reading import checkpoints_main; checkpoints_main([{str(root)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
