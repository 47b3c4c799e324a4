"""Route a text with a model of transformers, adaptive or not, to see what its routers do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from acmoe.analyze.hf_record import record_batches
from acmoe.analyze.hf_text import (
    BLOCK,
    Batch,
    HuggingFaceConfig,
    as_batch,
    cut_rows,
    most_positions,
    read_text,
)
from acmoe.analyze.sampling import HuggingFaceModel, Sampled, record_modes
from acmoe.config.routing import Statistics
from acmoe.errors import UserError, check
from acmoe.routing.rescaling import RescalingRouter
from acmoe.runtime import pick_device


def sample_folder(folder: Path, config: HuggingFaceConfig) -> Sampled:
    """Load the model in `folder` and route a text with it."""
    try:
        from acmoe.hf.checkpoints import load
    except ImportError as error:
        raise UserError(
            f"--hf needs transformers 5.17 or later ({error}); run pip install 'acmoe[hf]'"
        ) from error
    check(folder.is_dir(), f"{folder} is no folder; models are read from disk, never downloaded")
    load.load_config(folder)
    tokenizer = None if config.raw_bytes else load.load_tokenizer(folder)
    found = read_text(config, tokenizer)
    model = load.load_model(folder, pick_device(config.device))
    size = model.get_input_embeddings().num_embeddings
    check(
        max(found.ids) < size,
        f"token {max(found.ids)} of {config.text} is outside the model's vocabulary of {size}; the "
        "tokenizer is that of another model",
    )
    block = min(BLOCK, most_positions(model.config) - (found.start is not None))
    batches = cut_rows(found, block, config.batch)
    start = "" if found.start is None else ", each after the start token, which is not counted"
    return sample_model(
        model,
        batches,
        name=folder.resolve().name,
        title=config.text.name,
        pieces=found.pieces,
        sample=f"the first {len(found.ids):,} {'bytes' if config.raw_bytes else 'tokens'} of "
        f"{config.text.name}, in rows of {block}{start}, {config.batch} rows a forward pass",
        layers=config.layers,
        statistics=config.statistics,
        seed=config.seed,
    )


def sample_model(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Tensor] | Batch],
    *,
    name: str | None = None,
    title: str = "a text",
    pieces: Sequence[str] = (),
    sample: str | None = None,
    layers: Sequence[int] | None = None,
    statistics: Statistics | None = None,
    seed: int = 0,
) -> Sampled:
    """Route batches with a model that is in memory; `acmoe.analyze.analysis.analyze` measures it.

    Args:
        model: A causal model of transformers with MoE layers, plain or attached. It is run in
            evaluation mode and left as it was.
        batches: Tensors of token ids (B, L), or dicts of model inputs. Tokens that the
            `attention_mask` leaves out are not counted.
        name: Name of the model in titles; that of its class if not given.
        title: Name of the text in titles.
        pieces: The text of each counted token, in order, for the figures.
        sample: Description of the sample.
        layers: MoE layers, counted from 1, whose router inputs are kept for separation,
            conditioning, scale and maps. None: all.
        statistics: Statistics mode of attached routers; None: the model's own.
        seed: Draws the tokens whose router input is kept, at most 2000.
    """
    from acmoe.hf.discovery import find_stacks

    _check_foreign(model)
    taken = [as_batch(one) for one in batches]
    count = _count_tokens(taken, pieces)
    stacks = find_stacks(model)
    sample = sample or f"{count:,} tokens of {title}"
    record = partial(record_batches, model, stacks, taken, sample=sample, layers=layers, seed=seed)
    own, compared = record_modes(model, statistics, record)
    described = HuggingFaceModel(
        name=name or type(model).__name__,
        router=_router_name([found.module for stack in stacks for found in stack.routers]),
        title=title,
        pieces=tuple(pieces),
        settings=_settings(getattr(model, "config", None)),
    )
    return Sampled(run=described, step=None, own=own, compared=compared, disturbed=None)


def _check_foreign(model: nn.Module) -> None:
    """Raise a UserError for a model of acmoe itself, whose adaptive routers read other arguments
    than routers of transformers."""
    from acmoe.hf.parts import attached_parts

    attached = bool(attached_parts(model))
    own = next((one for one in model.modules() if isinstance(one, RescalingRouter)), None)
    check(
        attached or own is None,
        f"{type(model).__name__} has routers of acmoe ({type(own).__name__}), and sample_model "
        "reads those of transformers; analyze its run by `acmoe analyze RUN`, or export it by "
        "`acmoe export DIR --to run OUT` before",
    )


def _count_tokens(batches: Sequence[Batch], pieces: Sequence[str]) -> int:
    """Return the number of counted tokens; check that there are some, and a piece for each."""
    count = sum(int(one.counted.sum()) for one in batches)
    check(count > 0, "batches hold no token that counts; give some text")
    check(
        not pieces or len(pieces) == count,
        f"{len(pieces)} pieces of text for {count} tokens; give one for each",
    )
    return count


def _router_name(routers: Sequence[nn.Module]) -> str:
    """Return "adaptive" if any router is, else the class of the first."""
    from acmoe.hf.observe import is_adaptive

    adaptive = any(is_adaptive(router) for router in routers)
    return "adaptive" if adaptive else type(routers[0]).__name__


def _settings(config: Any) -> dict[str, Any]:
    """Return the fields of a config as values that JSON can hold."""
    if not hasattr(config, "to_json_string"):
        return {}
    found = json.loads(config.to_json_string(use_diff=False))
    return found if isinstance(found, dict) else {}
