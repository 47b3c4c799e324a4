"""Translate the tensors of a checkpoint file to the names that a model's modules have.

The files of some families hold one tensor per expert, and their modules one for all experts.
`from_pretrained` translates. The Trainer of transformers 5.22 does not: it gives a file's tensors
to `load_state_dict` as they are, when it resumes and when it loads the best checkpoint.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from acmoe.errors import check


def by_module_names(model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of `state_dict` under the names of the model's modules.

    Tensors that no conversion of the model's family knows stay as they are.
    """
    own = model.state_dict().keys()
    foreign = {name: value for name, value in state_dict.items() if name not in own}
    if not foreign or own <= state_dict.keys():
        return state_dict
    twin = _empty_twin(model)
    conversions = get_model_conversion_mapping(twin)
    if not conversions:
        return state_dict
    config = LoadStateDictConfig(weight_mapping=conversions)
    report, _ = convert_and_load_state_dict_in_model(twin, foreign, config)
    parts = sorted(str(one[0]) for one in report.mismatched_keys) + sorted(report.conversion_errors)
    check(
        not parts,
        f"this state_dict holds only some of the experts of {parts and parts[0]}: it is one of "
        "several files; join them by MODEL = AutoModelForCausalLM.from_pretrained(PATH), "
        "MODEL.save_pretrained(PATH, max_shard_size='10TB')",
    )
    translated = {name: value for name, value in twin.state_dict().items() if not value.is_meta}
    left = {name: value for name, value in foreign.items() if name in report.unexpected_keys}
    return {**{k: v for k, v in state_dict.items() if k in own}, **translated, **left}


def _empty_twin(model: PreTrainedModel) -> nn.Module:
    """Return a model of the same class, config and dtype without values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device("meta"):
            twin: nn.Module = type(model)(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(before)
    return twin
