"""The base class of this library's transformers models: loading, precision, recomputation."""

import logging
import os
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from acmoe.errors import check
from acmoe.hf.checkpoints.adapters import StatisticsBeside, follow_peft
from acmoe.hf.models.config import AcmoeConfig
from acmoe.models.by_hand import warn_of_attributes
from acmoe.models.registry import build_model
from acmoe.ops.dispatch import log_once
from acmoe.routing.statistics.step import StepStatistics


class AcmoePreTrainedModel(StatisticsBeside, PreTrainedModel):  # type: ignore[misc]
    """A model of this library in `self.model`, in the interface of transformers.

    Running statistics are part of the state_dict and stay float32 in every dtype. Every step
    of a `torch.optim.Optimizer` updates them.
    """

    config_class = AcmoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch
    _no_split_modules: ClassVar[list[str]] = [
        *("PostNormBlock", "PreNormBlock", "SwinBlock", "ViTBlock")
    ]

    config: AcmoeConfig

    def __init__(self, config: AcmoeConfig, model: nn.Module | None = None) -> None:
        super().__init__(config)
        follow_peft()
        self.gradient_checkpointing = False
        self.model: Any = build_model(config.library) if model is None else model
        keep_float32(self.model)
        statistics = (n for n, m in self.named_modules() if isinstance(m, StepStatistics))
        self._keep_in_fp32_modules_strict = set(statistics)

    def init_weights(self) -> None:
        """Leave the weights as they are: the library has drawn them when it built the model."""
        self.tie_weights(recompute_mapping=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a checkpoint did not hold: new heads, and buffers that are not saved.

        transformers guards `torch.nn.init`, so that loaded weights stay as they are.
        """
        if isinstance(module, StepStatistics):
            empty_unloaded(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Save the model; warn of attributes that were set by hand, which no config has.

        Where it has adapters of PEFT, transformers saves these alone.
        """
        replaced = getattr(self, "hf_quantizer", None) is not None  # by modules of its own
        if not replaced and not getattr(self, "_hf_peft_config_loaded", False):
            with torch.device("meta"):
                built = build_model(self.config.library)
            warn_of_attributes(self.model, built, stacklevel=2)
        super().save_pretrained(save_directory, *args, **kwargs)

    def check_placed(self) -> None:
        """Raise a UserError if accelerate has offloaded a tensor that it will not load in time.

        accelerate loads the tensors of a module when the module is called. This model reads some
        tensors without such a call: they would be on the meta device, without values.
        """
        if not hasattr(self, "_hf_hook"):
            return
        read = [self.model, *(m for m in self.modules() if isinstance(m, StepStatistics))]
        tensors = [t for m in read for t in (*m.parameters(recurse=False), *m.buffers(False))]
        if isinstance(embed := getattr(self.model, "embed", None), nn.Module):
            tensors += embed.parameters()  # new caches are made where its weight is
        check(
            not any(tensor.is_meta for tensor in tensors),
            "accelerate has offloaded tensors that this model reads outside of a module's call; "
            "offload whole blocks by accelerate.dispatch_model with a device_map that keeps the "
            "rest, without offload_buffers",
        )

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute the activations inside blocks in backward; routing choices are saved."""
        options = gradient_checkpointing_kwargs or {}
        check(
            every_n_layers == 1 and not offload and options in ({}, {"use_reentrant": False}),
            f"gradient checkpointing with every_n_layers={every_n_layers}, offload={offload}, "
            f"{options}; every block is recomputed, without reentrant autograd: leave these "
            "options out, or pass use_reentrant=False",
        )
        self.gradient_checkpointing = self.model.checkpoint_blocks = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = self.model.checkpoint_blocks = False


def refuse(**arguments: Any) -> None:
    """Raise a UserError for an argument of transformers that our models cannot serve.

    PEFT passes these arguments by name in every call, as None.
    """
    for name, value in arguments.items():
        remedy = "pass input_ids" if name == "inputs_embeds" else "leave it out"
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        check(
            value is None or value is False,
            f"{name}={given} is not supported by the models of acmoe; {remedy}",
        )


def keep_float32(model: nn.Module) -> None:
    """Make all running statistics float32, whatever the default dtype was at construction."""
    for module in model.modules():
        if isinstance(module, StepStatistics):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.float()


def empty_unloaded(statistics: StepStatistics) -> None:
    """Give buffers that the checkpoint did not hold the values of a new module."""
    loaded = {
        name: buffer.clone()
        for name, buffer in statistics._buffers.items()
        if buffer is not None and getattr(buffer, "_is_hf_initialized", False)
    }
    statistics.reset_parameters()
    for name, values in loaded.items():
        statistics.get_buffer(name).copy_(values)


def say_aux_loss_is_left(aux_loss: torch.Tensor) -> None:
    """Warn once that a call which records gradients has no labels, and so adds no auxiliary loss.

    The Trainer takes the labels away where it has label_smoothing_factor or compute_loss_func.
    """
    if aux_loss.requires_grad and not torch.compiler.is_compiling():
        log_once(
            "a training call without labels has no loss that the auxiliary loss of the routers is "
            "part of: add output.aux_loss to your own; the Trainer with label_smoothing_factor or "
            "compute_loss_func leaves it out",
            logging.WARNING,
        )


def add_aux_loss(
    loss: torch.Tensor, aux_loss: torch.Tensor, count: torch.Tensor, num_items: Any
) -> torch.Tensor:
    """Return the mean loss plus the auxiliary loss, as the share of `num_items` that this call has.

    The Trainer adds up the losses of the micro-batches of a step. With num_items, the labels of the
    whole step, each micro-batch is weighted by its `count` of labels; None: by 1.
    """
    total = loss + aux_loss.to(loss.device)
    return total if num_items is None else total * (count / num_items)
