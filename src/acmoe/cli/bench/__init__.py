"""`acmoe bench`: the subcommands that measure, tune, and write the tables."""

from acmoe.cli.bench.command import Bench

__all__ = ["Bench"]
