"""Tell `torch.export` from `torch.compile`."""

import torch


def exporting() -> bool:
    """Return True inside `torch.export`.

    Before torch 2.12 Dynamo takes `torch.compiler.is_exporting()` for True in `torch.compile`, too.
    With the mark below it runs this function as Python, and takes what that returns.
    """
    return torch.compiler.is_exporting()


exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
