"""All commands, in the order of the help page."""

import acmoe.lab.variants  # noqa: F401, registers the router adaptive-variant
from acmoe.cli.arguments.parse import Command
from acmoe.cli.bench import Bench
from acmoe.cli.data import Data
from acmoe.cli.demo import Demo
from acmoe.cli.doctor import Doctor
from acmoe.cli.models import Models
from acmoe.cli.run.analyze import Analyze
from acmoe.cli.run.attack import Attack
from acmoe.cli.run.evaluate import Evaluate
from acmoe.cli.run.export import Export
from acmoe.cli.run.finetune import Finetune
from acmoe.cli.run.generate import Generate
from acmoe.cli.run.report import Report
from acmoe.cli.run.shift import Shift
from acmoe.cli.study import Study
from acmoe.cli.theory import Theory
from acmoe.cli.train import Train

COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "doctor": Doctor,
    "models": Models,
    "data": Data,
    "train": Train,
    "evaluate": Evaluate,
    "finetune": Finetune,
    "attack": Attack,
    "shift": Shift,
    "analyze": Analyze,
    "report": Report,
    "generate": Generate,
    "export": Export,
    "study": Study,
    "theory": Theory,
    "bench": Bench,
}
