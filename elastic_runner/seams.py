"""The places where goodrun sits inside torch.distributed.elastic, and the check at start that each is still there.

Everything private that is used is listed here (docs/design.md explains each). A torch that moved one gives one clear line
before any worker is started, instead of a crash in the middle of a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import SeamError

_TAILS = "_tail_logs"
_TAILS_BEFORE_2_10 = ("_stdout_tail", "_stderr_tail")


def _names() -> list[tuple[object, str, tuple[str, ...]]]:
    """(owner, name, parameters that must exist) of every seam."""
    import torch.distributed.elastic.agent.server.local_elastic_agent as lea
    import torch.distributed.elastic.multiprocessing.api as mp_api
    import torch.distributed.launcher.api as launcher_api
    import torch.distributed.run as run

    agent = lea.LocalElasticAgent
    return [
        (run, "get_args_parser", ()),
        (run, "run", ("args",)),
        (launcher_api, "LocalElasticAgent", ("spec", "logs_specs")),
        (lea, "start_processes", ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes")),
        (agent, "_rendezvous", ("worker_group",)),
        (agent, "_assign_worker_ranks", ("store", "group_rank", "group_world_size", "spec")),
        (agent, "_monitor_workers", ("worker_group",)),
        (agent, "_restart_workers", ("worker_group",)),
        (agent, "_stop_workers", ("worker_group",)),
        (agent, "_shutdown", ()),
        (run, "determine_local_world_size", ("nproc_per_node",)),
        (run, "parse_min_max_nnodes", ("nnodes",)),
        (run, "run_script_path", ("training_script",)),
        (agent, "_exit_barrier", ()),
        (mp_api.SubprocessContext, "_start", ()),
        (mp_api.SubprocessContext, "_close", ("death_sig", "timeout")),
        (mp_api, "ProcessFailure", ("local_rank", "pid", "exitcode", "error_file")),
        (mp_api, "RunProcsResult", ("failures", "return_values")),
    ]


def _attributes() -> list[tuple[type[Any], str]]:
    """(class, attribute that its constructor sets) of every private attribute that is used."""
    import torch.distributed.elastic.agent.server.api as agent_api
    import torch.distributed.elastic.multiprocessing.api as mp_api

    agent = agent_api.SimpleElasticAgent
    return [(agent, "_remaining_restarts"), (agent, "_worker_group"), (mp_api.PContext, _TAILS)]


def tails(context: Any) -> list[Any]:
    """What copies the ranks' streams to the console (`--tee`), to be started with the ranks."""
    listed = getattr(context, _TAILS, None)
    return [getattr(context, name) for name in _TAILS_BEFORE_2_10] if listed is None else list(listed)


def check() -> None:
    """Raise SeamError, naming torch's version and what it lacks, unless every seam is in place."""
    import torch

    try:
        names, attributes = _names(), _attributes()
    except (ImportError, AttributeError) as e:
        raise SeamError(f"torch {torch.__version__} has moved a part that goodrun needs ({e}); tested with torch 2.13.0") from e
    for owner, name, parameters in names:
        where = f"{getattr(owner, '__name__', owner)}.{name}"
        thing = getattr(owner, name, None)
        if thing is None:
            raise SeamError(f"torch {torch.__version__} has no {where}, which goodrun needs; tested with torch 2.13.0")
        have = inspect.signature(thing).parameters
        missing = [p for p in parameters if p not in have and not any(v.kind is v.VAR_KEYWORD for v in have.values())]
        if missing:
            raise SeamError(f"{where} of torch {torch.__version__} no longer takes {missing[0]!r}; tested with torch 2.13.0")
    for cls, attribute in attributes:
        sets = {*cls.__init__.__code__.co_names}
        if attribute not in sets and not (attribute == _TAILS and sets.issuperset(_TAILS_BEFORE_2_10)):
            raise SeamError(f"{cls.__name__} of torch {torch.__version__} no longer has {attribute}; tested with torch 2.13.0")


@contextmanager
def swapped(agent_class: type[Any], start_processes: Any) -> Iterator[None]:
    """For the length of the block torch's launcher builds `agent_class` and starts workers through `start_processes`."""
    import torch.distributed.elastic.agent.server.local_elastic_agent as lea
    import torch.distributed.launcher.api as launcher_api

    old_agent, old_start = launcher_api.LocalElasticAgent, lea.start_processes
    launcher_api.LocalElasticAgent = agent_class  # type: ignore[misc]
    lea.start_processes = start_processes
    try:
        yield
    finally:
        launcher_api.LocalElasticAgent = old_agent  # type: ignore[misc]
        lea.start_processes = old_start
