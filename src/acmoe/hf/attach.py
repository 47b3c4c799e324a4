"""Make the MoE layers of a transformers model adaptive, and plain again.

The router of MoE layer m reads M_k* h in place of h, where k* is the token's first choice at MoE
layer m - 1; the experts read h. Only hooks and one submodule per router are added, so that all
code and weights of the model stay its own. The model gets a subclass of its class, by which it is
saved and loaded (`acmoe.hf.checkpoints.classes`).
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.hf.checkpoints.classes import adopt, check_whole, release
from acmoe.hf.checkpoints.options import AttachOptions, check_config
from acmoe.hf.parts import add_parts, attached_parts, remove_parts

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    config: str | AdaptiveConfig = "adaptive",
    *,
    skip: int = 1,
    layers: Sequence[int] | None = None,
    blend_steps: int = 0,
) -> Model:
    """Make the MoE routers of a transformers model adaptive, in place, and return the model.

    Running statistics begin empty, with M = I: the logits of a fresh attach are bitwise those of
    the plain model. They move at every optimizer step, or by `acmoe.calibrate`.

    Args:
        model: A model of transformers 5.17 or later with MoE layers, of any family; or any module
            around one, such as a PEFT model.
        config: "adaptive", or an `AdaptiveConfig`. `running` and `prefix` statistics are causal
            and can be generated with; the fields `base` and `scale_experts` need acmoe's own
            layers.
        skip: Number of MoE layers in front that stay plain. The first always does, since nothing
            before it forms clusters, so 0 means 1. The paper's "Skip 1" is skip=2.
        layers: Depths of the adaptive MoE layers, counted from 0 among the MoE layers of each
            stack, in place of `skip`, which then keeps its default.
        blend_steps: Number of optimizer steps over which M_b = (1 - b) I + b M goes from the plain
            router, b = 0, to the adaptive one, b = 1. 0: b = 1 at once. See
            `acmoe.hf.set_blend`.

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> import acmoe
    >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    >>> config = MixtralConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config).eval()
    >>> tokens = torch.tensor([[3, 14, 15, 9]])
    >>> before = model(tokens).logits
    >>> model = acmoe.attach(model, acmoe.AdaptiveConfig(statistics="running"))
    >>> torch.equal(model(tokens).logits, before)
    True
    """
    check(
        layers is None or skip == 1,
        f"skip={skip} has no effect with layers={layers}; leave one of them out",
    )
    options = AttachOptions(check_config(config), skip, layers, blend_steps)
    add_parts(model, options)
    adopt(model, options)
    return model


def detach(model: Model) -> Model:
    """Take off what `attach` added, in place, and return the model: it is bitwise as before.

    The statistics are lost; save the model first to keep them.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> import acmoe
    >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    >>> config = MixtralConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    >>> model = MixtralForCausalLM(config)
    >>> keys = list(model.state_dict())
    >>> list(acmoe.detach(acmoe.attach(model)).state_dict()) == keys
    True
    """
    check(
        bool(attached_parts(model)),
        f"{type(model).__name__} has no attached router; pass the model that acmoe.attach got",
    )
    check_whole(model)
    remove_parts(model)
    release(model)
    return model
