"""Load statistics where PEFT puts the weights of one adapter into the place of another's.

Programs import `peft.utils.hotswap.hotswap_adapter` by name, so that to replace it would come too
late. The two functions that it calls are wrapped instead: one reads the adapter's files, and the
other writes into the model.
"""

import functools
import importlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

# The adapter whose weights were read last: its place, the options that chose it, one tensor.
_read: ContextVar[tuple[str, dict[str, Any], Tensor] | None] = ContextVar("read", default=None)

# Loads the statistics beside an adapter: (model, place, options of the hub, name of the adapter).
Load = Callable[[nn.Module, str, dict[str, Any], str], None]


def follow_hotswap(load: Load) -> None:
    """Have `hotswap_adapter` load statistics by `load`, once; PEFT has been imported."""
    try:
        module: Any = importlib.import_module("peft.utils.hotswap")
    except ImportError:  # a version of PEFT without it
        return
    module.load_peft_weights = _reading(module.load_peft_weights)
    module.hotswap_adapter_from_state_dict = _swapping(module.hotswap_adapter_from_state_dict, load)


def _reading(read: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    @functools.wraps(read)
    def load_peft_weights(model_id: str, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        tensors = read(model_id, *args, **kwargs)
        _read.set((model_id, kwargs, next(iter(tensors.values()))) if tensors else None)
        return tensors

    return load_peft_weights


def _swapping(swap: Callable[..., None], load: Load) -> Callable[..., None]:
    """Wrap the function that writes tensors into an adapter: it then loads the statistics, too.

    Tensors that were not read from a file just before have no statistics beside them.
    """

    @functools.wraps(swap)
    def hotswap_adapter_from_state_dict(
        model: nn.Module,
        state_dict: dict[str, Tensor],
        adapter_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        swap(model, state_dict, adapter_name, *args, **kwargs)
        found = _read.get()
        _read.set(None)
        if found is not None and any(tensor is found[2] for tensor in state_dict.values()):
            load(model, *found[:2], adapter_name)

    return hotswap_adapter_from_state_dict
