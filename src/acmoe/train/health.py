"""Error report for a loss or gradient that is not finite: where it began, what is still good."""

import contextlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from acmoe.distributed.whole import whole_state
from acmoe.errors import NonFiniteError, UserError
from acmoe.train.checkpoint import first_nonfinite, last_good
from acmoe.train.trainer import Trainer


class TrainingStopped(UserError):  # noqa: N818, an event of the run, not an error of the code
    """A value is NaN or infinite; the message says where this began and what to try."""

    of_all_ranks = True  # every process of the run raises it, with the same message


def training_stopped(trainer: Trainer, step: int, bad: int, good: Path | None) -> TrainingStopped:
    """Build the error of a run at `step`; `recent[bad]` of the trainer is the first bad batch.

    `good` is the latest checkpoint.
    """
    first = step - len(trainer.recent) + 1 + bad
    where = _first_nonfinite_weight(trainer) or _first_nonfinite_output(
        trainer, trainer.recent[bad]
    )
    return TrainingStopped(
        f"step {first} gave a loss or gradient that is not finite: {where}; {last_good(good)}; "
        f"try a lower lr than {trainer.config.lr}, or clip=1.0, in another folder"
    )


def validation_stopped(
    trainer: Trainer, step: int, error: NonFiniteError, good: Path | None
) -> TrainingStopped:
    """Build the error of a run whose validation after `step` is not finite."""
    where = _first_nonfinite_weight(trainer)
    if where is None:
        with nonfinite_outputs(trainer.model) as found, contextlib.suppress(NonFiniteError):
            trainer.validate()
        where = first_found(trainer, found) or "validated again, every layer gives finite values"
    reason = str(error).partition(";")[0]
    return TrainingStopped(
        f"the validation after step {step} cannot be scored, {reason}: {where}; {last_good(good)}; "
        f"try a lower lr than {trainer.config.lr}, or clip=1.0, in another folder"
    )


def _first_nonfinite_weight(trainer: Trainer) -> str | None:
    """Describe the first tensor of the model that is not finite; processes may have others."""
    found = trainer.ranks.gather(first_nonfinite(whole_state(trainer.model)))
    return next((line for line in found if line), None)


def _first_nonfinite_output(trainer: Trainer, batch: Any) -> str:
    """Run the batch again and describe the first module whose output is not finite."""
    with nonfinite_outputs(trainer.model) as found:
        trainer.replay(batch)
    return first_found(trainer, found) or (
        "read again, the batch gives finite values, so its memory or its gradient does not"
    )


def first_found(trainer: Trainer, found: list[str]) -> str | None:
    """Return the first line of the first process that found one, and its rank; or None."""
    ranks = trainer.ranks
    lines = [(rank, line) for rank, lines in enumerate(ranks.gather(found)) for line in lines]
    if not lines:
        return None
    # The stages of a pipeline are called in the order of their blocks, not of their ranks.
    pipelined = trainer.config.parallel.pipeline > 1
    rank, line = min(lines, key=lambda each: _depth(each[1])) if pipelined else lines[0]
    return line if ranks.size == 1 else f"rank {rank}: {line}"


def _depth(line: str) -> float:
    """Return the number of the block that a line of `nonfinite_outputs` names."""
    block = re.match(r"blocks\.(\d+)", line)
    if block is not None:
        return int(block[1])
    return -1 if line.startswith("embed") else math.inf


@contextmanager
def nonfinite_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect inside `with`, in order of calls, the modules whose output is not finite."""
    found: list[str] = []

    def hook(name: str) -> Any:
        def check_output(module: nn.Module, arguments: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    found.append(f"{name} ({type(module).__name__}) first gives {_example(tensor)}")
                    return

        return check_output

    # The model itself is left out: its output contains the loss, which is known to be bad.
    modules = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(hook(name)) for name, module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple):
        for part in output:
            yield from _tensors(part)


def _example(tensor: Tensor) -> float:
    """Return the first value that is nan, inf or -inf."""
    return float(tensor[~tensor.isfinite()].flatten()[0])
