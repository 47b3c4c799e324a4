"""When a loss or gradient is no number any more: where it went wrong, and what is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from acmoe.errors import UserError


class Examined(Protocol):
    """What is asked of a trainer whose loss is no number any more."""

    recent: list[Any]

    @property
    def model(self) -> nn.Module: ...
    @property
    def config(self) -> Any: ...
    def replay(self, batch: Any) -> None: ...


class TrainingStopped(UserError):  # noqa: N818, an event of the run and no fault of the code
    """Something is NaN or infinite; the message says where that began and what to try."""


def stopped(trainer: Examined, step: int, bad: int, good: Path | None) -> TrainingStopped:
    """The error of a run at `step`, where batch `bad` of the recent ones was the first to fail."""
    first = step - len(trainer.recent) + 1 + bad
    where = first_bad_parameter(trainer.model) or _first_bad_output(trainer, trainer.recent[bad])
    kept = f"the last good checkpoint is {good}" if good else "no checkpoint was written before"
    return TrainingStopped(
        f"step {first} gave a loss or gradient that is not finite: {where}; {kept}; try a lower lr "
        f"than {trainer.config.lr}, or clip=1.0, in another folder"
    )


def first_bad_parameter(model: nn.Module) -> str | None:
    """The first parameter or buffer, in order of the model, with a value that is not finite."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not bool(tensor.isfinite().all()):
            return f"{name} holds {_example(tensor)}"
    return None


def _first_bad_output(trainer: Examined, batch: Any) -> str:
    """The first module that gives such a value on that batch, read again."""
    with watched(trainer.model) as found:
        trainer.replay(batch)
    if found:
        return found[0]
    return "read again, the batch gives finite values, so its memory or its gradient does not"


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """Collect, inside `with`, every module that gives a value that is not finite, in order."""
    found: list[str] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    found.append(f"{name} ({type(module).__name__}) first gives {_example(tensor)}")
                    return

        return look

    # Not the model itself: its loss is what called us.
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
    """nan, inf or -inf: the first such value."""
    return float(tensor[~tensor.isfinite()].flatten()[0])
