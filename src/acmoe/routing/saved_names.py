"""Load the state_dict of a plain router into an adaptive one, and the reverse.

An adaptive router keeps the weights of the router that it wraps in `base`: its `base.embedding` is
the `embedding` of the plain one. Under `load_state_dict(strict=False)` torch leaves out tensors of
unknown names and the weights would stay random, so they are renamed before the names are compared.
Running statistics, which a plain router does not have, stay as they are: M = I where none were
taken.
"""

from typing import Any

from torch import nn

BASE = "base"


def rename_for_base(router: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Move tensors into `base`, or out of it, if the router has them there and the state_dict not.

    It is a pre-hook of `load_state_dict`, where `prefix` ends with a dot or is empty.
    """
    names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    saved = {name.partition(".")[0] for name in names}
    own = _own_names(router)
    moved: dict[str, str] = {}
    if BASE in saved and BASE not in own:
        inside = [name.partition(".")[2] for name in names if name.startswith(f"{BASE}.")]
        moved = {f"{BASE}.{name}": name for name in inside if name.partition(".")[0] in own - saved}
    elif BASE in own and BASE not in saved:
        wanted = _own_names(router.get_submodule(BASE)) - own
        moved = {name: f"{BASE}.{name}" for name in names if name.partition(".")[0] in wanted}
    for old, new in moved.items():
        state_dict[prefix + new] = state_dict.pop(prefix + old)


def _own_names(module: nn.Module) -> set[str]:
    """Return the names of its parameters, buffers and modules, and of its extra state."""
    names = {*module._parameters, *module._buffers, *module._modules}
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        names.add("_extra_state")
    return names
