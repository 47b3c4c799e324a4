"""Settings that every training run shares, whether it trains on text or on images."""

import re
from typing import Literal, Protocol

from acmoe.errors import check, check_choice, check_not_negative, check_positive, is_finite

Precision = Literal["fp32", "bf16"]

_COUNTS = ("batch", "split", "log_every", "eval_every", "eval_batch", "checkpoint_every", "keep")


class UpdateSettings(Protocol):
    """The fields of a run's config that `check_updates` reads, beside those of `_COUNTS`."""

    @property
    def batch(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def warmup(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float | None: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def seed(self) -> int: ...
    @property
    def device(self) -> str: ...


def check_updates(run: UpdateSettings, *, rows: str) -> None:
    """Check optimizer, schedule, logging and checkpoint settings.

    `rows` names the items of a batch in error messages, such as "images".
    """
    for name in _COUNTS:
        check_count(getattr(run, name), name)
    for name in ("warmup", "min_lr", "weight_decay", "seed"):
        check_not_negative(getattr(run, name), name)
    check_positive(run.lr, "lr")
    check_positive(run.eps, "eps")
    for beta in run.betas:
        check(0 <= beta < 1, f"betas={run.betas}; both must lie in [0, 1)")
    check(
        run.clip is None or (is_finite(run.clip) and run.clip > 0),
        f"clip={run.clip}; it must be positive and finite, or none",
    )
    check_choice(run.schedule, ("constant", "cosine"), "schedule")
    check_choice(run.precision, ("fp32", "bf16"), "precision")
    check(run.min_lr <= run.lr, f"min_lr={run.min_lr} exceeds lr={run.lr}; lower it")
    check(
        run.batch % run.split == 0,
        f"batch={run.batch} {rows} do not split into {run.split} micro-batches; make split a "
        "divisor",
    )
    check_device(run.device)


def check_count(value: object, name: str) -> None:
    """Check that the setting called `name` is an integer of at least 1."""
    whole = isinstance(value, int) and value >= 1
    check(whole, f"{name}={value!r}; it must be a whole number of at least 1")


def check_device(device: str) -> None:
    """Check the spelling of a device; `acmoe.runtime.pick_device` checks that it exists."""
    check(
        re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", device) is not None,
        f"device={device!r} is unknown; use auto, cpu, cuda, cuda:0, xpu or mps",
    )
