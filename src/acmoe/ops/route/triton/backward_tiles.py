"""Tiles and launch options of the kernels in backward.py, by numbers of experts and features.

Names such as olmoe are benchmark shapes (lab/bench/shapes.py); times are those of an H200.
"""

from typing import NamedTuple

from acmoe.ops.device.launcher import next_power_of_2
from acmoe.ops.route.triton.rescale import MANY_EXPERTS


class Tile(NamedTuple):
    """Tile sizes (BT tokens, BD features, BE experts) and launch options of a kernel."""

    tokens: int
    features: int
    experts: int
    num_warps: int
    num_stages: int
    steps: int = 1  # blocks of features that one program computes in sequence
    token_major: bool = False  # consecutive programs share a token block, not a feature block
    prefetch_addend: bool = False  # load the addend of a feature block one step early


def token_launch_table(
    num_experts: int,
    dim: int,
    num_parts: int,
    unsorted: bool,
    has_scale: bool = False,
    has_addend: bool = True,
) -> Tile:
    """Choose the tile of `_token_kernel`.

    Where registers allow, BE covers all experts, and a program loads d affinity of its tokens once
    for `steps` blocks of features. 8 blocks are usual: 1 took 43 us more (olmoe, H200). A narrow
    float32 model has 6 and takes 3 at a time, so that there are enough programs. For sorted tokens
    the rows of d affinity are scattered in memory, and long ones with many experts: 135 us with 16
    blocks, 158 with 8 (qwen30b). More than 128 experts, or 128 with a bf16x3 split, do not fit the
    registers; their d affinity is loaded again for every block of features, by whole rows if
    unsorted: 207 us with 3 stages against 287 with 2 and by columns, with a scale 234 against 327;
    without one 128 features at a time take 196 (qwen3next).

    For unsorted tokens of a wide model `token_major` lets consecutive programs write whole rows: 98
    -> 88 us at olmoe, and 83 with `prefetch_addend` (qwen30b 138 -> 118, fine 105 -> 91). Sorted
    tokens get slower by both. A narrow row of 16-bit numbers belongs to one program, with
    prefetched addends: the layer of switch takes 2 us less, that of swin 4 us less; for sorted
    tokens 2 us less at switch, but 3 us more at swin.

    Without an addend, as in compiled models, the kernel only writes. Sorted float32 tokens of a
    narrow model then have small tiles: 15.5 us instead of 19.5 at switch (cold caches).
    """
    experts = max(16, next_power_of_2(num_experts))
    if num_experts > MANY_EXPERTS and num_parts == 2 and unsorted and not has_scale:
        return Tile(64, 128, 64, 4, 2, 1, True)
    if experts > (128 if num_parts == 2 else 64):
        return Tile(64, 64, 64, 4, 3 if num_parts == 2 else 2, 1, unsorted)
    narrow = dim < 1024
    if unsorted and narrow and num_parts == 3:
        return Tile(64, 64, experts, 4, 3, 3)
    if unsorted:
        tokens, num_warps, stages = (128, 8, 2) if experts == 128 and not narrow else (64, 4, 3)
        return Tile(tokens, 64, experts, num_warps, stages, 8, True, True)
    if experts == 128:
        return Tile(64, 64, experts, 4, 2, 16)
    if experts == 16 and narrow and num_parts == 3 and not has_addend:
        return Tile(32, 64, experts, 4, 3, 6, True)
    return Tile(64, 64, experts, 4, 3, 8, prefetch_addend=dim < 384 and num_parts == 2)


def embedding_launch_table(
    num_experts: int, dim: int, num_parts: int, num_token_parts: int = 0
) -> Tile:
    """Choose the tile of `_embedding_kernel`.

    num_token_parts: the numbers that are loaded of a token's feature, 2 of a bf16x2 split; 0 if the
    kernel rescales each token, too.

    Up to 64 experts use 4 warps: 8 warps took 86 us instead of 50, and 217 instead of 146 with a
    scale (olmoe, H200). A sorted token takes two dependent loads, first its index and then its row:
    with 3 stages one load of x is in flight, with 5 stages two (switch: 15.3 -> 12.7 us). float32
    tokens are twice as wide and take half the features (switch: 23.7 -> 19.8 us, sorted 23.4 ->
    21.6, rescaled one by one 34.2 -> 21.6, cold caches). With more experts 5 stages would exceed
    the shared memory; a fourth one fits with a bf16x2 split (58 -> 53 us at olmoe, 105 -> 96 at
    qwen30b, without a scale). With few experts a wide model gets wide blocks of features, so that
    fewer programs read d affinity (mixtral 51 -> 35 us). So do many experts (qwen3next 194 -> 150
    us), unless each token is rescaled (323 -> 467). A bf16x2 split of the tokens needs shorter
    steps for the 99 KiB of shared memory of smaller cards.
    """
    experts = min(128, max(16, next_power_of_2(num_experts)))
    num_warps = 8 if experts == 128 else 4
    if dim < 1024 and experts == 16:
        return Tile(64, 32, 16, 2, 5) if num_parts == 3 else Tile(64, 64, 16, 4, 5)
    if dim < 1024:
        return Tile(64, 32, experts, num_warps, 3)
    if num_experts > MANY_EXPERTS and num_parts == 2 and num_token_parts > 0:
        return Tile(64, 128, 64, 4, 3) if num_token_parts == 1 else Tile(32, 128, 128, 8, 3)
    if num_parts == 3:
        return Tile(64, 64, experts, num_warps, 3)
    return Tile(64, 128 if experts == 16 else 64, experts, num_warps, 4)
