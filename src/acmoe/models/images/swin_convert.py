"""Load published weights of the dense Swin into this library's model.

Checkpoints name their tensors `layers.2.blocks.0.attn.qkv.weight`, in one of two conventions: the
original one puts the merge of patches at the end of a stage and calls the head `head`; timm puts
the merge at the start of the next stage and calls the head `head.fc`. Both are read. Experts may
start as copies of the dense layer they replace; gates keep their random initialisation.
"""

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from acmoe.errors import UserError, check
from acmoe.models.images.swin import SwinModel

# Replacements from our names to the published ones, applied in this order.
_NAMES = (
    ("embed.project.", "patch_embed.proj."),
    ("embed.norm.", "patch_embed.norm."),
    ("stages.", "layers."),
    (".norm_attention.", ".norm1."),
    (".attention.position.table", ".attn.relative_position_bias_table"),
    (".attention.qkv.", ".attn.qkv."),
    (".attention.output.", ".attn.proj."),
    (".norm_layer.", ".norm2."),
    (".layer.experts.up_bias", ".mlp.fc1.bias"),
    (".layer.experts.down_bias", ".mlp.fc2.bias"),
    (".layer.experts.up", ".mlp.fc1.weight"),
    (".layer.experts.down", ".mlp.fc2.weight"),
    (".layer.up.", ".mlp.fc1."),
    (".layer.down.", ".mlp.fc2."),
    (".merge.", ".downsample."),
)
# Constant buffers in old checkpoints, which are skipped.
_CONSTANT = re.compile(r"\.(attn\.relative_position_index|attn\.relative_coords_table|attn_mask)$")
_FIXES = (
    (".mlp.fc2.bias", "build the model with last_bias=True"),
    (".relative_position_bias_table", "choose the window it was trained with"),
    ("head.", "pass head=False to keep the model's own"),
)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or torch file, without executing anything."""
    file = Path(path)
    check(file.is_file(), f"{file} does not exist; give a file of Swin weights")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file} cannot be read as weights ({reason}); download it again"
        ) from error
    found = found.get("model", found) if isinstance(found, dict) else found
    check(
        isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values()),
        f"{file} holds no tensors by name; give a state_dict of Swin",
    )
    return dict(found)


def load_dense_swin(
    model: SwinModel,
    weights: Mapping[str, Tensor] | str | os.PathLike[str],
    *,
    upcycle: bool = False,
    head: bool = True,
) -> None:
    """Load published dense weights into `model`, after checking that they fit and all are used.

    Args:
        model: a Swin of the same sizes; `position="table"` and `last_bias=True` as Swin was built.
        weights: the tensors, or a file of them.
        upcycle: start every expert as a copy of the dense layer it replaces. A softmax gate over
            all experts still weights their output, so the model is not yet the dense one. False:
            experts keep their weights.
        head: also load the classifier; False if the classes differ.
    """
    check(
        model.config.position == "table",
        f"position={model.config.position!r}, and published Swin weights hold a table of offsets; "
        "build the model with position='table'",
    )
    given = weights if isinstance(weights, Mapping) else read_weights(weights)
    theirs = _plain_names(given)
    own = model.state_dict()
    sources = {name: _source(name, upcycle=upcycle, head=head) for name in own}
    wanted = {name: source for name, source in sources.items() if source is not None}
    for name, source in wanted.items():
        check(
            source in theirs,
            f"the weights lack {source}, which {name} needs; give Swin weights of "
            f"depths={model.config.depths}, or build the model like them",
        )
    _check_all_used(theirs, set(wanted.values()), model, upcycle=upcycle, head=head)
    converted = {
        name: _fitted(theirs[source], own[name], source, copies=".layer.experts." in name)
        for name, source in wanted.items()
    }
    model.load_state_dict(converted, strict=False)


def _plain_names(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to the original convention."""
    late = "layers.0.downsample.reduction.weight" not in given
    plain = {}
    for name, tensor in given.items():
        if _CONSTANT.search(name):
            continue
        moved = re.match(r"layers\.(\d+)\.downsample\.(.+)", name)
        if late and moved:
            name = f"layers.{int(moved[1]) - 1}.downsample.{moved[2]}"
        plain[re.sub(r"^head\.fc\.", "head.", name)] = tensor
    return plain


def _source(name: str, *, upcycle: bool, head: bool) -> str | None:
    """Return the name of the published tensor for one of ours; None: keep the initial value."""
    gate = ".layer.router." in name or ".layer.next_state." in name
    if gate or (".layer.experts." in name and not upcycle) or (name[:5] == "head." and not head):
        return None
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return name


def _check_all_used(
    theirs: Mapping[str, Tensor], used: set[str], model: SwinModel, *, upcycle: bool, head: bool
) -> None:
    """Raise a UserError if published tensors have no counterpart in the model."""
    config = model.config
    experts = tuple(
        f"layers.{stage}.blocks.{block}.mlp."
        for stage in config.moe_stages
        for block in range(1, config.depths[stage], 2)
    )
    left_out = (() if upcycle else experts) + (() if head else ("head.",))
    unused = sorted(name for name in theirs.keys() - used if not name.startswith(left_out))
    if unused:
        raise UserError(
            f"the weights hold {unused[0]} ({len(unused)} tensors in all) for which the model has "
            f"no place; {_fix(unused[0])}"
        )


def _fitted(tensor: Tensor, own: Tensor, source: str, *, copies: bool) -> Tensor:
    """Return the tensor in the model's shape; `copies`: one copy per expert."""
    shape = own.shape[1:] if copies else own.shape
    check(
        tensor.shape == shape,
        f"the weights hold {source} of shape {tuple(tensor.shape)}, the model needs "
        f"{tuple(shape)}; {_fix(source)}",
    )
    return tensor.to(own.dtype).expand(own.shape)


def _fix(source: str) -> str:
    """Suggest a fix for a tensor that does not fit."""
    return next((fix for part, fix in _FIXES if part in source), "build a model of its sizes")
