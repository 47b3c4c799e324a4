"""Measure the running statistics of an attached model without training it."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.hf.checkpoints.statistics import has_statistics
from acmoe.hf.parts import attached_parts
from acmoe.ops.statistics.over_ranks import of_each_rank
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.statistics.group import pooled_groups, update_all

Model = TypeVar("Model", bound=nn.Module)
Batch = Tensor | Mapping[str, Any]
_END: Any = object()  # comes after the last batch


@torch.no_grad()
def calibrate(model: Model, batches: Iterable[Batch]) -> Model:
    """Move the running statistics by one update per batch, and return the model.

    Each batch counts as one training step whose weights stay as they are. Apart from the
    statistics nothing changes: no weight, no other buffer, no mode and no random number generator;
    dropout and router noise are off meanwhile.

    batches: tensors of token ids (B, L), or dicts of model inputs, with an attention_mask where
    there is padding. With several processes, each passes its own batches, and all the same number;
    an update then counts the tokens of all processes, as in training. A batch of padding alone
    raises; with several processes, only if it is one on all of them. A batch for which the model
    gives NaN raises, too; the batches before it have been counted.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> import acmoe
    >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    >>> config = MixtralConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    >>> model = acmoe.attach(MixtralForCausalLM(config))
    >>> model = acmoe.calibrate(model, [torch.randint(50, (4, 32)) for _ in range(3)])
    """
    statistics = _statistics(model)
    check(
        not isinstance(batches, Tensor | Mapping),
        f"batches is a {type(batches).__name__}, which is one batch; pass a list, [batch]",
    )
    check(
        hasattr(batches, "__iter__") or hasattr(batches, "__getitem__"),
        f"batches is a {type(batches).__name__}; pass a list of batches, or a DataLoader",
    )
    seen, measured = 0, False
    with _measuring(model, statistics):
        groups = pooled_groups(statistics)
        for batch in _in_step(batches, groups):
            seen += 1
            inputs = _inputs(model, batch)
            _check_not_padding(inputs, groups, seen)
            _check_numbers(model(**inputs), inputs, groups, seen)
            measured = measured or any(
                bool(one.pending_buffer("last_count").any()) for one in statistics
            )
            update_all(statistics)
        check(seen > 0, "batches is empty; pass tensors of token ids, or dicts of model inputs")
        check(
            _on_any(measured, groups),
            f"batches: in none of {seen} two tokens have the same first choice, so no average was "
            "updated; pass more tokens in a batch",
        )
    return model


def _in_step(batches: Iterable[Batch], groups: Sequence[str]) -> Iterator[Batch]:
    """Yield the batches; raise on every process if one of them has fewer than another.

    Without this, a process with more batches would wait for the others until a timeout.
    """
    remaining: Iterator[Any] = iter(batches)
    for count in itertools.count():
        batch = next(remaining, _END)
        for group in groups:
            ended = [one is True for one in of_each_rank(batch is _END, group)]
            check(
                all(ended) or not any(ended),
                f"batches: rank {ended.index(True) if any(ended) else 0} has {count}, and other "
                "processes have more; give every process the same number of batches",
            )
        if batch is _END:
            return
        yield batch


def _check_not_padding(inputs: Mapping[str, Any], groups: Sequence[str], number: int) -> None:
    """Raise, on every process of a group, if none of them has a token in its batch."""
    mask = inputs.get("attention_mask")
    # In a 4-D mask zeros may stand for tokens; the model says whether it takes one.
    has_token = not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.any())
    check(
        _on_any(has_token, groups),
        f"batches: number {number} is padding alone, its attention_mask is 0 everywhere; leave it "
        "out",
    )


def _check_numbers(
    output: Any, inputs: Mapping[str, Any], groups: Sequence[str], number: int
) -> None:
    """Raise, on every process of a group, if the model gave NaN for a token that is no padding."""
    found = getattr(output, "logits", None)
    found = getattr(output, "last_hidden_state", None) if found is None else found
    if not isinstance(found, Tensor) or found.dim() != 3:
        return
    bad_BL = found.amax(-1).isnan()  # the greatest of a row with NaN is NaN
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == bad_BL.shape:
        bad_BL = bad_BL & mask.to(bad_BL.device).bool()
    bad = int(bad_BL.sum())
    anywhere = [any(of_each_rank(bad > 0, group)) for group in groups] or [bad > 0]
    where = f"for {bad} of {bad_BL.numel()} tokens" if bad else "on another process"
    check(
        not any(anywhere),
        f"batches: the model gives NaN {where} of number {number}; look for inputs or weights that "
        "are not finite, or calibrate in bfloat16 or float32",
    )


def _on_any(value: bool, groups: Sequence[str]) -> bool:
    """Return True if the value is True on a process of each group, or here if there is none."""
    return all(any(of_each_rank(value, group)) for group in groups) if groups else value


def _statistics(model: nn.Module) -> list[ClusterStatistics]:
    parts = attached_parts(model).values()
    check(
        bool(parts) or not has_statistics(model),
        f"{type(model).__name__} is a model of acmoe, whose statistics are updated in training; "
        "calibrate is for models that acmoe.attach has made adaptive",
    )
    check(
        bool(parts),
        f"{type(model).__name__} has no attached router; call acmoe.attach(model) first",
    )
    found = [part.statistics for part in parts]
    statistics = [one for one in found if one is not None]
    modes = set(statistics[0].config.modes)
    check(
        bool(modes & {"running", "prefix"}),
        f"statistics={statistics[0].mode!r} never read a running average, so there is nothing to "
        "calibrate; use statistics='running' or 'prefix'",
    )
    return statistics


def _inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments of a call, on the device of the model."""
    if isinstance(batch, Tensor):
        check(
            batch.dim() == 2 and not batch.is_floating_point(),
            f"batches holds a tensor {tuple(batch.shape)} of {batch.dtype}; pass token ids (B, L), "
            "or a dict such as {'inputs_embeds': ...}",
        )
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise UserError(
            f"batches holds a {type(batch).__name__}; pass tensors of token ids, or dicts of model "
            "inputs"
        )
    ids = batch.get("input_ids")
    check(
        ids is None or (isinstance(ids, Tensor) and ids.dim() == 2),
        f"batches holds a dict whose input_ids are {_shown(ids)}, as in one row of a dataset; pass "
        "tensors (B, L): a DataLoader(rows, collate_fn=DataCollatorWithPadding(tokenizer)) makes "
        "them",
    )
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:  # accelerate has offloaded the model, and moves its inputs itself
        return {"use_cache": False, **batch}
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    return {"use_cache": False, **moved}


def _shown(ids: object) -> str:
    return f"a tensor {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"


@contextlib.contextmanager
def _measuring(model: nn.Module, statistics: list[ClusterStatistics]) -> Iterator[None]:
    """Set the statistics to training and all else to evaluation; restore everything afterwards.

    Batches that a training step has recorded and not yet used are put back as well.
    """
    modes = {module: module.training for module in model.modules()}
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    counters = [(one.forwards, one.has_pending, one.own) for one in statistics]
    pending = [(one.last_dispersion.clone(), one.last_count.clone()) for one in statistics]
    try:
        model.eval()
        for one in statistics:
            one.training = True
            one.last_count.zero_()
            one.own = {}
        with torch.random.fork_rng(sorted(index for index in devices if index is not None)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for one, counter, (dispersion, count) in zip(statistics, counters, pending, strict=True):
            one.forwards, one.has_pending, one.own = counter
            one.last_dispersion.copy_(dispersion)
            one.last_count.copy_(count)
