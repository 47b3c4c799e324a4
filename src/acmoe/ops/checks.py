"""Checks of tensor arguments: shapes, dtypes and value ranges.

Values are read only on the CPU, outside `torch.compile` and `torch.func`: reading one on an
accelerator would synchronise in every training step, so the check there is an asynchronous device
assert.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from acmoe.errors import UserError, check
from acmoe.ops.dispatch import eager, transforming


def check_tokens(x: Tensor, assignment: Tensor, token_mask: Tensor | None) -> None:
    """Require x of (T, D) or (B, L, D), and one assignment and mask entry per token."""
    check(
        x.dim() in (2, 3),
        f"x has shape {tuple(x.shape)}; pass (tokens, features) or (sequences, length, features)",
    )
    check(x.is_floating_point(), f"x has dtype {x.dtype}; pass floating-point hidden states")
    check(
        assignment.shape == x.shape[:-1],
        f"assignment has shape {tuple(assignment.shape)}; one cluster per token of x needs "
        f"{tuple(x.shape[:-1])}",
    )
    check(
        not assignment.is_floating_point() and assignment.dtype != torch.bool,
        f"assignment has dtype {assignment.dtype}; pass integer cluster ids",
    )
    check_token_mask(x, token_mask)


def check_token_mask(x: Tensor, token_mask: Tensor | None) -> None:
    """Require a bool mask with one entry per token of x, if there is a mask."""
    if token_mask is None:
        return
    check(
        isinstance(token_mask, Tensor),
        f"token_mask is a {type(token_mask).__name__}; pass a bool tensor, True for real tokens",
    )
    check(
        token_mask.shape == x.shape[:-1],
        f"token_mask has shape {tuple(token_mask.shape)}; one entry per token of x needs "
        f"{tuple(x.shape[:-1])}",
    )
    check(
        token_mask.dtype == torch.bool,
        f"token_mask has dtype {token_mask.dtype}; pass a bool tensor, True for real tokens",
    )


def check_range(ids: Tensor, low: int, high: int, name: str, more: str = "") -> None:
    """Require every id in [low, high); `more` ends the message."""
    if torch.compiler.is_compiling() or transforming() or ids.numel() == 0 or ids.is_meta:
        return
    ids = ids.long()  # in uint8 or int8 a bound could overflow
    if ids.device.type != "cpu":
        inside = ((ids >= low) & (ids < high)).all()
        torch._assert_async(inside, f"{name} holds ids outside [{low}, {high}){more}")
        return
    if not has_values(ids):
        return
    least, most = torch.aminmax(ids)
    if least.item() < low or most.item() >= high:
        bad = ids[(ids < low) | (ids >= high)].flatten()[0].item()
        raise UserError(f"{name} holds id {bad}; ids must lie in [{low}, {high}){more}")


def check_one_run(mask_BN: Tensor, name: str, fix: str) -> None:
    """Require that the True entries of every row follow each other without a gap."""
    if torch.compiler.is_compiling() or transforming() or not has_values(mask_BN):
        return
    before_BN = torch.nn.functional.pad(mask_BN[:, :-1], (1, 0))
    one_run_B = (mask_BN & ~before_BN).sum(1) <= 1
    if mask_BN.device.type != "cpu":
        torch._assert_async(one_run_B.all(), f"{name} has padding between tokens; {fix}")
    elif not one_run_B.all():
        row = int((~one_run_B).nonzero()[0])
        raise UserError(f"{name} has padding between the tokens of row {row}; {fix}")


def has_values(x: Tensor) -> bool:
    """Return False for tensors that are a shape and no more: on the meta device, or fake."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def check_clusters(assignment: Tensor, num_clusters: int) -> None:
    """Require cluster ids from -1 to C - 1, on a CPU only.

    On a GPU the check would take more launches than the op; kernels read an id outside as -1.
    """
    if assignment.device.type == "cpu":
        check_range(assignment, -1, num_clusters, "assignment")


def host_may_read(x: Tensor) -> bool:
    """Return True if a branch may depend on the values of x: on a CPU, where nothing traces it.

    Definitions use it to leave out operations that would change nothing.
    """
    return x.device.type == "cpu" and x.numel() > 0 and eager(x)


def check_count(value: int, name: str) -> None:
    """Require value >= 1."""
    check(value >= 1, f"{name}={value}; it must be at least 1")


def check_whole(value: object, name: str) -> None:
    """Require a whole number of at least 1: an int, or an object with `__index__`, as numpy's."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool | Tensor)
    check(whole, f"{name}={value!r}; it must be a whole number")
    check(value >= 1, f"{name}={value}; it must be at least 1")  # type: ignore[operator]


def check_dim(x: Tensor, dim: int) -> None:
    """Require x of (T, dim) or (B, L, dim)."""
    if x.dim() not in (2, 3) or x.shape[-1] != dim:
        raise UserError(
            f"x has shape {tuple(x.shape)}; this layer takes (tokens, {dim}) or "
            f"(sequences, length, {dim})"
        )
