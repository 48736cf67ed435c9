"""`python -m goodrun.elastic_runner` is `goodrun`."""

from .cli import console

console()
