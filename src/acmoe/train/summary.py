"""How a call of `train` ended."""

from dataclasses import dataclass
from pathlib import Path

from acmoe.train.journal import Journal


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a call of `train` ended."""

    folder: Path
    step: int  # updates done in all
    steps: int  # updates of the whole run
    signal: int | None  # that asked to stop, if one did
    seconds: float  # of training, all calls together
    metric: str
    best: float | None  # of the validation split, in units of the metric
    best_step: int | None

    @classmethod
    def of(
        cls, folder: Path, steps: int, journal: Journal, step: int, signal: int | None
    ) -> "Summary":
        return cls(
            folder=folder,
            step=step,
            steps=steps,
            signal=signal,
            seconds=journal.seconds,
            metric=journal.metric,
            best=journal.best_value,
            best_step=journal.best_step,
        )

    @property
    def message(self) -> str:
        """One line for a person."""
        if self.step < self.steps:
            return (
                f"stopped at step {self.step} of {self.steps}, saved in {self.folder}; give the "
                "same command again to continue"
            )
        best = "" if self.best is None else f", best {self.metric} {self.best:.4f}"
        at = "" if self.best_step is None else f" at step {self.best_step}"
        return f"done: {self.steps} steps in {self.seconds:.0f} s{best}{at} ({self.folder})"
