"""What every run of optimizer updates is asked, whatever it trains."""

import re
from typing import TYPE_CHECKING

from acmoe.errors import check, check_choice, check_not_negative, check_positive

if TYPE_CHECKING:
    from acmoe.config.images.train import VisionRunConfig
    from acmoe.config.text.train import RunConfig

_COUNTS = ("batch", "split", "log_every", "eval_every", "eval_batch", "checkpoint_every", "keep")


def check_updates(run: "RunConfig | VisionRunConfig", *, rows: str) -> None:
    """Optimizer, schedule and bookkeeping; `rows` are what a batch consists of."""
    for name in _COUNTS:
        check_count(getattr(run, name), name)
    for name in ("warmup", "min_lr", "weight_decay", "seed"):
        check_not_negative(getattr(run, name), name)
    check_positive(run.lr, "lr")
    check_positive(run.eps, "eps")
    for beta in run.betas:
        check(0 <= beta < 1, f"betas={run.betas}; both must lie in [0, 1)")
    check(run.clip is None or run.clip > 0, f"clip={run.clip}; it must be positive, or none")
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
    whole = isinstance(value, int) and value >= 1
    check(whole, f"{name}={value!r}; it must be a whole number of at least 1")


def check_device(device: str) -> None:
    check(
        re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is not None,
        f"device={device!r} is unknown; use auto, cpu, cuda or cuda:0",
    )
