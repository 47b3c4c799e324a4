"""Check the paper's theory numerically: where it holds, and where it fails as printed."""

from acmoe.lab.theory.check import Check
from acmoe.lab.theory.report import all_confirmed, render, to_json
from acmoe.lab.theory.suite import run_checks

__all__ = ["Check", "all_confirmed", "render", "run_checks", "to_json"]
