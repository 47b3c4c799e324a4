"""Every command, in the order of the help page."""

from acmoe.cli.data import Data
from acmoe.cli.models import Models
from acmoe.cli.parse import Command
from acmoe.cli.theory import Theory

COMMANDS: dict[str, type[Command]] = {
    "models": Models,
    "data": Data,
    "theory": Theory,
}
