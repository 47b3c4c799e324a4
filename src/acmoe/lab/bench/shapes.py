"""The layers to measure, given by name or by their sizes.

T tokens, D features, F hidden units of an expert, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from acmoe.errors import UserError, check
from acmoe.ops.experts.reference import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one MoE layer and its number of tokens."""

    name: str
    tokens: int
    dim: int
    hidden: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    load: str = ""  # one of LOADS; empty: loads differ by chance only

    @property
    def bias(self) -> bool:
        """Return whether experts have biases: gated ones have none, those of the paper do."""
        return self.activation != "swiglu"

    @property
    def width(self) -> int:
        """Return the output width of the first GEMM, which computes gate and up side by side."""
        return 2 * self.hidden if self.activation == "swiglu" else self.hidden

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def flops(self, *, backward: bool) -> int:
        """Count the FLOPs of the experts' GEMMs. Backward has two GEMMs for each of forward."""
        forward = 2 * self.rows * self.dim * (self.width + self.hidden)
        return 3 * forward if backward else forward


def _shape(name: str, *sizes: int, activation: str = "swiglu") -> Shape:
    tokens, dim, hidden, num_experts, top_k = sizes
    return Shape(
        name=name,
        tokens=tokens,
        dim=dim,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        activation=activation,
    )


_PUBLISHED = (
    _shape("olmoe", 32768, 2048, 1024, 64, 8),
    _shape("qwen30b", 32768, 2048, 768, 128, 8),
    _shape("fine", 32768, 1536, 256, 128, 8),
    _shape("mixtral", 8192, 4096, 14336, 8, 2),
    _shape("switch", 24576, 352, 352, 16, 2, activation="relu"),
    _shape("swin", 25088, 384, 1536, 16, 2, activation="gelu"),
)
# Layers of published models that are not in the table of tuned kernels: they measure the rules and
# the tuning at first use. dsv3 is one of eight expert-parallel ranks of DeepSeek-V3, with 32 of its
# 256 experts. Its 16,384 tokens choose 8 of these 32, which gives it the rows that it would receive
# under an even load from eight ranks of 16,384 tokens each.
_MODELS = (
    _shape("dsv2lite", 16384, 2048, 1408, 64, 6),
    _shape("dsv3", 16384, 7168, 2048, 32, 8),
    _shape("gptoss", 16384, 2880, 2880, 32, 4),
    _shape("qwen3next", 16384, 2048, 512, 512, 10),
    _shape("granite", 16384, 1536, 512, 40, 8),
    _shape("scout", 16384, 5120, 8192, 16, 1),
    _shape("phi", 16384, 4096, 6400, 16, 2),
    _shape("mixtral22b", 16384, 6144, 16384, 8, 2),
)
# The layer of the recipe switch-nano, with the tokens of its batch.
_NANO = _shape("nano", 1024, 64, 64, 8, 2, activation="relu")
_TINY = (
    _shape("tiny", 256, 32, 48, 8, 2),
    _shape("tiny-relu", 192, 24, 32, 4, 1, activation="relu"),
)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in (*_PUBLISHED, *_MODELS, _NANO, *_TINY)}


SKEW, EVEN = "skew", "even"
LOADS = (SKEW, EVEN)  # loads that `find_shape` knows
_LOAD = "+"  # before the load in a shape's name


def find_shapes(
    names: Sequence[str], device: torch.device, tokens: Sequence[int] = ()
) -> list[Shape]:
    """Return the named shapes; without names every published one, or on a CPU the tiny ones.

    tokens: return each shape with each of these numbers of tokens instead of its own.
    """
    published = _PUBLISHED if device.type == "cuda" else _TINY
    shapes = [find_shape(name) for name in names] or list(published)
    if not tokens:
        return shapes
    return [with_tokens(shape, number) for shape in shapes for number in tokens]


def with_tokens(shape: Shape, tokens: int) -> Shape:
    """Return the shape with another number of tokens, named NAME@TOKENS."""
    name = shape.name.partition("@")[0]
    check(tokens > 0, f"shape {name!r} cannot have {tokens} tokens; give a positive number")
    return replace(shape, name=f"{name}@{tokens}", tokens=tokens)


def find_shape(name: str) -> Shape:
    """Find a shape by name, or by sizes such as 8192x4096x14336x8x2 or 24576x352x352x16x2-relu.

    NAME@TOKENS, such as olmoe@2048, is the same layer with another number of tokens. NAME+skew is
    the same layer where nearly half of the tokens choose one expert, and NAME+even the one where
    all experts have the same number of rows, give or take one where the rows do not divide.
    """
    known, at, tokens = name.partition("@")
    if at:
        check(
            tokens.isdecimal(),
            f"shape {name!r}: give a number of tokens after @, and the load before it, as in "
            f"tiny{_LOAD}{SKEW}@32",
        )
        return with_tokens(find_shape(known), _size(tokens, name))
    known, plus, load = name.partition(_LOAD)
    if plus:
        choices = " or ".join(f"{_LOAD}{one}" for one in LOADS)
        check(load in LOADS, f"shape {name!r}: the load after {_LOAD} is unknown; write {choices}")
        return replace(find_shape(known), name=name, load=load)
    if name in SHAPES:
        return SHAPES[name]
    sizes, dash, activation = name.partition("-")
    numbers = sizes.split("x")
    if len(numbers) != 5 or not all(number.isdecimal() for number in numbers):
        raise UserError(
            f"shape {name!r} is unknown; choose among {', '.join(SHAPES)}, or give your own as "
            "TOKENSxFEATURESxHIDDENxEXPERTSxTOP_K, such as 8192x4096x14336x8x2, with -relu or "
            "-gelu behind it for experts that are not gated"
        )
    found = [_size(number, name) for number in numbers]
    shape = _shape(name, *found, activation=activation if dash else "swiglu")
    check(
        shape.activation in ACTIVATIONS,
        f"shape {name!r}: activation {activation!r} is unknown; choose {', '.join(ACTIVATIONS)}",
    )
    check(min(found) > 0, f"shape {name!r} holds a zero; every size must be positive")
    check(
        shape.top_k <= shape.num_experts,
        f"shape {name!r} sends a token to {shape.top_k} of {shape.num_experts} experts; "
        "give TOP_K last, at most EXPERTS",
    )
    return shape


def _size(digits: str, name: str) -> int:
    """Return one size of the shape called `name`, which must fit into int64."""
    check(
        len(digits) <= 18, f"shape {name!r} holds the size {digits}; give at most 18 digits for it"
    )
    return int(digits)
