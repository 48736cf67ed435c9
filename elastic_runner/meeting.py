"""How the nodes of a job are to meet, by the command line."""

from __future__ import annotations

import argparse

from .errors import UsageError


class _Default(str):
    """A word that nobody has said: equal to torchrun's default, but not the same."""

    def __str__(self) -> str:  # argparse passes a default through its type, str
        return self


NOT_SAID = _Default("static")
"""What `--rdzv-backend` is where none was given."""


def choose_rendezvous(args: argparse.Namespace, max_nodes: int) -> None:
    """Several nodes meet through goodrun's own backend unless another was named; a static command line tells it where."""
    if args.spare_nodes is not None and args.spare_nodes < 0:
        raise UsageError(f"--spare-nodes {args.spare_nodes} must be 0 or more")
    if args.rdzv_backend is NOT_SAID and max_nodes > 1 and not args.standalone:
        args.rdzv_backend = "goodrun"
    if args.snapshot_replicas < 0:
        raise UsageError(f"--snapshot-replicas {args.snapshot_replicas} must be 0 or more")
    if args.snapshot_replicas and (max_nodes == 1 or args.rdzv_backend != "goodrun"):
        raise UsageError("--snapshot-replicas needs other nodes (--nnodes above 1) and goodrun's own rendezvous, which knows them")
    if args.rdzv_backend == "goodrun" and not args.rdzv_endpoint:
        args.rdzv_endpoint = f"{args.master_addr}:{29500 if args.master_port is None else args.master_port}"


def check_rendezvous(args: argparse.Namespace) -> None:
    """Find early what torch would only stumble over once the job has begun."""
    from torch.distributed.elastic.rendezvous import registry
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    known = getattr(registry.handler_registry, "_registry", {})  # only for an early answer: torch has the last word
    if known and args.rdzv_backend not in (*known, "goodrun") and not args.standalone:
        raise UsageError(f"--rdzv-backend {args.rdzv_backend} is unknown; there are {', '.join(sorted(known))}")
    try:
        _parse_rendezvous_config(args.rdzv_conf)
    except ValueError as e:
        raise UsageError(f"--rdzv-conf {args.rdzv_conf}: {e}") from e
