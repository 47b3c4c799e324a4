"""The options of every benchmark of layers: shapes, data type, passes and rounds."""

from dataclasses import dataclass

import torch

from acmoe.errors import check, check_choice

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORWARD, BOTH = "forward", "forward+backward"
WARM_UP = 3  # calls before the first timed one


@dataclass(frozen=True, kw_only=True)
class ShapesConfig:
    """Options of every benchmark of layers."""

    shapes: tuple[str, ...] = ()  # empty: all published shapes, or on a CPU the tiny ones
    tokens: tuple[int, ...] = ()  # numbers of tokens; empty: each shape's own
    dtype: str = "auto"  # auto: bf16 on a GPU, fp32 on a CPU
    forward: bool = False  # the forward pass without gradients alone; a backward never runs
    graph: bool = False  # time replays of a CUDA graph, without launch overhead
    repeat: int = 50
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self.dtype, ("auto", *DTYPES), "dtype")
        check(self.repeat >= 2, f"repeat={self.repeat}; quartiles need at least 2 rounds")

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """Return the data type of weights and tokens on this device."""
        auto = "bf16" if device.type == "cuda" else "fp32"
        return DTYPES[auto if self.dtype == "auto" else self.dtype]
