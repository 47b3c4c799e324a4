"""The dense Swin in the plainest form: no windows are cut, every pair of tokens is asked.

Reads a state dict in the published naming. Nothing here shares a line with acmoe.

Shapes: B batch, Y rows and X columns of the map, T = Y * X tokens, D features, H heads,
P features of a head.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Bias = Callable[[int, int], Tensor]  # (H,) for the offset (rows, columns) of query minus key


def piece(place: int, side: int, window: int, shift: int) -> int:
    """The piece of a side that a place lies in, cut at shift, shift + window, ..."""
    return 0 if side <= window else (place - shift) // window


def pair_bias(size: tuple[int, int], window: int, shift: int, heads: int, bias: Bias) -> Tensor:
    """(H, T, T): the bias of every pair in one piece, -inf for every other pair."""
    places = [(y, x) for y in range(size[0]) for x in range(size[1])]
    result = torch.full((heads, len(places), len(places)), -math.inf, dtype=torch.float64)
    for q, query in enumerate(places):
        for k, key in enumerate(places):
            pieces = [
                [piece(at[axis], size[axis], window, shift) for axis in (0, 1)]
                for at in (query, key)
            ]
            if pieces[0] == pieces[1]:
                result[:, q, k] = bias(query[0] - key[0], query[1] - key[1])
    return result


def whole_map_attention(
    x_BYXD: Tensor,
    qkv: tuple[Tensor, Tensor],
    output: tuple[Tensor, Tensor],
    bias_HTT: Tensor,
) -> Tensor:
    """Every token against every token of its map."""
    B, Y, X, D = x_BYXD.shape
    heads = len(bias_HTT)
    qkv_BTD = x_BYXD.reshape(B, Y * X, D) @ qkv[0].T + qkv[1]
    parts = []
    for head in range(heads):
        q, k, v = (
            qkv_BTD[..., part * D + head * (D // heads) : part * D + (head + 1) * (D // heads)]
            for part in range(3)
        )
        score_BTT = q @ k.mT / math.sqrt(D // heads) + bias_HTT[head]
        parts.append(score_BTT.softmax(-1) @ v)
    return (torch.cat(parts, dim=-1) @ output[0].T + output[1]).view(B, Y, X, D)


def table_bias(table: Tensor, window: int) -> Bias:
    return lambda down, right: table[(down + window - 1) * (2 * window - 1) + right + window - 1]


def merge_patches(x_BYXD: Tensor) -> Tensor:
    """(B, Y/2, X/2, 4D): top left, bottom left, top right, bottom right."""
    _, Y, X, _ = x_BYXD.shape
    rows = []
    for y in range(0, Y, 2):
        squares = [
            torch.cat([x_BYXD[:, y + down, x + right] for right in (0, 1) for down in (0, 1)], -1)
            for x in range(0, X, 2)
        ]
        rows.append(torch.stack(squares, 1))
    return torch.stack(rows, 1)


def plain_swin(
    weights: Mapping[str, Tensor],
    images: Tensor,
    *,
    depths: Sequence[int],
    heads: Sequence[int],
    window: int,
    patch: int,
) -> Tensor:
    """Logits, in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (var + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(name: str) -> tuple[Tensor, Tensor]:
        return w[f"{name}.weight"], w[f"{name}.bias"]

    cut = images.double().unfold(2, patch, patch).unfold(3, patch, patch)  # B, C, Y, X, p, p
    x = torch.einsum("bcyxij,dcij->byxd", cut, w["patch_embed.proj.weight"])
    x = norm(x + w["patch_embed.proj.bias"], "patch_embed.norm")
    for stage, depth in enumerate(depths):
        size = (x.shape[1], x.shape[2])
        side = min(window, *size)
        for number in range(depth):
            block = f"layers.{stage}.blocks.{number}"
            table = w[f"{block}.attn.relative_position_bias_table"]
            shift = side // 2 if number % 2 else 0
            bias = pair_bias(size, side, shift, heads[stage], table_bias(table, side))
            attention = linear(f"{block}.attn.qkv"), linear(f"{block}.attn.proj")
            x = x + whole_map_attention(norm(x, f"{block}.norm1"), *attention, bias)
            hidden = F.gelu(F.linear(norm(x, f"{block}.norm2"), *linear(f"{block}.mlp.fc1")))
            x = x + F.linear(hidden, *linear(f"{block}.mlp.fc2"))
        if stage < len(depths) - 1:
            name = f"layers.{stage}.downsample"
            x = norm(merge_patches(x), f"{name}.norm") @ w[f"{name}.reduction.weight"].T
    return norm(x, "norm").mean((1, 2)) @ w["head.weight"].T + w["head.bias"]


def random_swin(
    *,
    depths: Sequence[int],
    heads: Sequence[int],
    window: int,
    patch: int,
    dim: int,
    image_size: int,
    classes: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """A checkpoint in the published naming, of random numbers."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (dim, 3, patch, patch),
        "patch_embed.proj.bias": (dim,),
        **norm_shapes("patch_embed.norm", dim),
    }
    for stage, depth in enumerate(depths):
        wide = dim * 2**stage
        side = min(window, image_size // (patch * 2**stage))
        for number in range(depth):
            block = f"layers.{stage}.blocks.{number}"
            shapes |= norm_shapes(f"{block}.norm1", wide) | norm_shapes(f"{block}.norm2", wide)
            table = f"{block}.attn.relative_position_bias_table"
            shapes[table] = ((2 * side - 1) ** 2, heads[stage])
            for name, out, into in (
                ("attn.qkv", 3 * wide, wide),
                ("attn.proj", wide, wide),
                ("mlp.fc1", 4 * wide, wide),
                ("mlp.fc2", wide, 4 * wide),
            ):
                shapes |= {f"{block}.{name}.weight": (out, into), f"{block}.{name}.bias": (out,)}
        if stage < len(depths) - 1:
            shapes |= norm_shapes(f"layers.{stage}.downsample.norm", 4 * wide)
            shapes[f"layers.{stage}.downsample.reduction.weight"] = (2 * wide, 4 * wide)
    last = dim * 2 ** (len(depths) - 1)
    shapes |= norm_shapes("norm", last)
    shapes |= {"head.weight": (classes, last), "head.bias": (classes,)}
    return {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else 0.2)
        for name, shape in shapes.items()
    }


def norm_shapes(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}
