"""The places where goodrun sits inside torch: all there in the installed torch, and each missed with one clear sentence."""

import inspect
import re

import pytest
import torch

from goodrun.elastic_runner import seams
from goodrun.elastic_runner.errors import GoodrunError, SeamError

NAMES = seams._names()


def names(of):
    owner, name, _ = of
    return f"{owner.__name__.rpartition('.')[2]}.{name}"


def test_the_installed_torch_has_every_seam():
    """The check passes."""
    seams.check()


@pytest.mark.parametrize("seam", NAMES, ids=names)
def test_a_name_that_was_removed_is_named(monkeypatch, seam):
    """torch's version, the whole name, and what was tested, in one line."""
    owner, name, _ = seam
    monkeypatch.setattr(owner, name, None)  # a subclass would find a deleted name in its base
    with pytest.raises(SeamError) as e:
        seams.check()
    assert str(e.value) == f"torch {torch.__version__} has no {owner.__name__}.{name}, which goodrun needs; tested with torch 2.13.0"


@pytest.mark.parametrize("seam", [s for s in NAMES if s[2]], ids=names)
def test_a_parameter_that_was_renamed_is_named(monkeypatch, seam):
    """The name, torch's version and the parameter that it no longer takes."""
    owner, name, parameters = seam

    def moved(*args):
        raise AssertionError

    moved.__signature__ = inspect.Signature(
        [inspect.Parameter(p.replace(parameters[-1], "renamed"), inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters]
    )
    monkeypatch.setattr(owner, name, moved)
    with pytest.raises(SeamError, match=re.escape(f"of torch {torch.__version__} no longer takes {parameters[-1]!r}")) as e:
        seams.check()
    assert name in str(e.value)


def test_any_keyword_will_do(monkeypatch):
    """A torch that takes the parameters as **kwargs has not moved them."""
    owner, name, _ = next(s for s in NAMES if s[1] == "start_processes")
    monkeypatch.setattr(owner, name, lambda **kwargs: None)
    seams.check()


def test_a_module_that_was_moved_is_one_line(monkeypatch):
    """A part that cannot even be imported is told in the same words, not as a traceback."""

    def gone():
        raise ImportError("No module named 'torch.distributed.launcher.api'")

    monkeypatch.setattr(seams, "_names", gone)
    with pytest.raises(SeamError) as e:
        seams.check()
    assert torch.__version__ in str(e.value)
    assert "torch.distributed.launcher.api" in str(e.value)
    assert "\n" not in str(e.value)
    assert isinstance(e.value, GoodrunError)


def test_torch_is_itself_again_afterwards():
    """Swapped for the length of the block, and given back even if it raises."""
    import torch.distributed.elastic.agent.server.local_elastic_agent as lea
    import torch.distributed.launcher.api as launcher_api

    before = launcher_api.LocalElasticAgent, lea.start_processes
    agent, start = type("Agent", (), {}), object()
    with pytest.raises(ValueError), seams.swapped(agent, start):
        assert (launcher_api.LocalElasticAgent, lea.start_processes) == (agent, start)
        raise ValueError
    assert (launcher_api.LocalElasticAgent, lea.start_processes) == before
