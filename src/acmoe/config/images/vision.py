"""Configs of the image classifiers: Swin-MoE, and a vision transformer with SoftMoE layers."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal

from acmoe.config.model_checks import (
    check_capacity,
    check_counts,
    check_heads,
    check_router_type,
    check_shares,
    check_top_k,
)
from acmoe.config.routing import (
    HashConfig,
    LossConfig,
    RouterConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    base_router,
)
from acmoe.errors import (
    UserError,
    check,
    check_choice,
    check_not_negative,
    check_positive,
    is_finite,
)

# Swin-MoE's gate: softmax over all experts, not renormalised over the selected ones, with noise
# in training.
SWIN_GATE = SMoEConfig(gate="all", noise=1.0)
SOFT_SLOTS = SoftConfig()


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """Swin-MoE: stages of window attention.

    Between two stages the width doubles and both sides of the feature map halve.
    """

    image_size: int = 224  # pixels per side; windows must tile the map of every stage
    channels: int = 3  # channels of an image
    num_classes: int = 1000  # classes of the data set
    patch: int = 4  # pixels per side of a patch
    dim: int  # features in the first stage
    depths: tuple[int, ...]  # blocks in each stage
    heads: tuple[int, ...]  # attention heads in each stage
    window: int = 7  # tokens per side; a smaller map is a single window
    mlp_ratio: int = 4  # hidden units of an MLP or expert, as a multiple of its features
    position: Literal["mlp", "table"] = "mlp"  # relative bias: Swin-MoE's MLP, Swin's table
    moe_stages: tuple[int, ...] = (2, 3)  # stages, counted from 0, whose odd blocks hold experts
    # The one stage whose MoE layers use an adaptive or random-scale router; those of other stages
    # keep the base router. Patch merging changes the tokens, so clusters do not carry over.
    adaptive_stage: int = 2
    num_experts: int = 16  # experts of an MoE layer
    top_k: int = 2  # experts that a token is sent to
    # Tokens that an expert takes of a batch, relative to an even share; None: no token is dropped.
    # It holds in every forward pass of the model. `acmoe evaluate`, `shift`, `attack` and `analyze`
    # remove it unless asked for it (`--capacity`): one image would change the result of another.
    capacity_factor: float | None = 1.25
    router: RouterConfig = SWIN_GATE  # router of the MoE layers in `adaptive_stage`
    placement: str | tuple[int, ...] = "full"  # as in LanguageConfig, within adaptive_stage
    balance: float = 0.1  # weight of the balance loss, summed over MoE layers
    # importance-load is (L_importance + L_load) / 2 and needs a gate with noise; switch is
    # E * sum of f_e * P_e. auto: importance-load for a gate with noise, else switch.
    balance_loss: Literal["auto", "importance-load", "switch"] = "auto"
    tutel: bool = False  # compute L_load as Tutel does, with which Swin-MoE was trained
    z: float = 0.0  # weight of the router z-loss
    last_bias: bool = False  # an output bias in every feed-forward layer; Swin has it
    expert_dropout: float = 0.1  # on the experts' hidden units
    drop_path: float = 0.2  # stochastic depth rate of the last block; rises linearly from 0
    init_std: float = 0.005  # for every linear weight, gate and expert
    label_smoothing: float = 0.0  # in training

    def __post_init__(self) -> None:
        check_counts(
            self,
            *("image_size", "channels", "num_classes", "patch", "dim", "window", "mlp_ratio"),
            *("num_experts", "top_k"),
        )
        for name in ("depths", "heads"):
            values = getattr(self, name)
            check(
                len(values) >= 1 and all(isinstance(v, int) and v >= 1 for v in values),
                f"{name}={values!r}; give one integer of at least 1 for each stage",
            )
        check_choice(self.position, ("mlp", "table"), "position")
        check_choice(self.balance_loss, ("auto", "importance-load", "switch"), "balance_loss")
        check_shares(self, "expert_dropout", "drop_path", "label_smoothing")
        check_not_negative(self.balance, "balance")
        check_not_negative(self.z, "z")
        check_positive(self.init_std, "init_std")
        check_capacity(self.capacity_factor)
        check(
            self.capacity_factor is None or is_finite(self.capacity_factor),
            f"capacity_factor={self.capacity_factor}; it must be finite, or none to drop no token",
        )
        self._check_stages()
        self._check_router()
        self._check_size()

    def _check_stages(self) -> None:
        check(
            len(self.heads) == len(self.depths),
            f"heads={self.heads} and depths={self.depths} differ in length; give both per stage",
        )
        for width, heads in zip(self.widths, self.heads, strict=True):
            check(
                width % heads == 0,
                f"a stage of {width} features does not split over {heads} heads; change heads",
            )
        for stage in self.moe_stages:
            check(
                0 <= stage < len(self.depths) and self.depths[stage] >= 2,
                f"moe_stages={self.moe_stages} asks for experts in the odd blocks of stage {stage}"
                f"; depths={self.depths} has none there (stages count from 0)",
            )

    def _check_router(self) -> None:
        check_router_type(self.router)
        base = base_router(self.router)
        check(
            not isinstance(base, SoftConfig),
            "router='soft' fills slots instead of choosing experts; use a softmoe model, or another"
            " router such as 'smoe'",
        )
        check(
            not isinstance(base, HashConfig)
            and not (isinstance(base, StableConfig) and not base.legacy),
            f"router={base.name!r} routes by token id, which an image has not; choose another, such"
            " as 'smoe' or 'cosine'",
        )
        check_top_k(self.top_k, self.num_experts)
        check(
            base is self.router or self.adaptive_stage in self.moe_stages,
            f"adaptive_stage={self.adaptive_stage} holds no experts for router="
            f"{self.router.name!r}; choose it among moe_stages={self.moe_stages}",
        )

    def _check_size(self) -> None:
        # Window sizes depend on image_size: test each candidate with its own windows.
        def fits(side: int) -> bool:
            return self._tiled(side, self._windows_at(side))

        if not fits(self.image_size):
            near = _nearest(self.image_size, fits)
            raise UserError(f"image_size: {self._misfit(self.image_size, near)}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of features in each stage."""
        return tuple(self.dim * 2**stage for stage in range(len(self.depths)))

    @property
    def windows(self) -> tuple[int, ...]:
        """Side of the windows of each stage, in tokens."""
        return self._windows_at(self.image_size)

    @property
    def losses(self) -> LossConfig:
        base = base_router(self.router)
        noisy = isinstance(base, SMoEConfig) and base.noise > 0
        if self.balance_loss == "importance-load" or (self.balance_loss == "auto" and noisy):
            return LossConfig(balance=0.0, importance_load=self.balance, z=self.z, tutel=self.tutel)
        return LossConfig(balance=self.balance, z=self.z)

    def is_moe(self, stage: int, block: int) -> bool:
        return stage in self.moe_stages and block % 2 == 1

    def num_moe_layers(self, stage: int) -> int:
        return self.depths[stage] // 2 if stage in self.moe_stages else 0

    def maps(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        """Feature map (rows, columns) of each stage for images of `height` x `width` pixels."""
        for side in (height, width):
            if not self._tiled(side, self.windows):
                near = _nearest(side, lambda other: self._tiled(other, self.windows))
                raise UserError(f"images of {height} x {width} pixels: {self._misfit(side, near)}")
        return tuple(zip(self._sides(height), self._sides(width), strict=True))

    def _sides(self, pixels: int) -> tuple[int, ...]:
        return tuple(pixels // (self.patch * 2**stage) for stage in range(len(self.depths)))

    def _windows_at(self, image_size: int) -> tuple[int, ...]:
        return tuple(min(self.window, max(1, side)) for side in self._sides(image_size))

    def _tiled(self, pixels: int, windows: tuple[int, ...]) -> bool:
        """Return True where an image side fits the model.

        Patches must tile the image, the map must halve evenly between stages, and each stage's map
        must be tiled by windows or fit in a single one.
        """
        fits = zip(self._sides(pixels), windows, strict=True)
        return pixels % (self.patch * 2 ** (len(self.depths) - 1)) == 0 and all(
            side <= window or side % window == 0 for side, window in fits
        )

    def _misfit(self, side: int, near: int) -> str:
        return (
            f"{side} is no side that patches of {self.patch} and windows of {self.window} tile in "
            f"all {len(self.depths)} stages; make it {near}, or change window"
        )


@dataclass(frozen=True, kw_only=True)
class SoftViTConfig:
    """A vision transformer with a class token and SoftMoE layers in its last blocks."""

    image_size: int = 224  # pixels per side of an image
    channels: int = 3  # channels of an image
    num_classes: int = 1000  # classes of the data set
    patch: int = 16  # pixels per side of a patch
    dim: int  # features of a token
    depth: int  # number of blocks
    heads: int  # attention heads
    mlp_ratio: int = 4  # hidden units of an MLP or expert, as a multiple of its features
    moe_blocks: int  # number of blocks, counted from the last, that hold experts
    num_experts: int  # experts of an MoE layer
    router: RouterConfig = SOFT_SLOTS  # SoftMoE slots, or an adaptive router over them
    placement: str | tuple[int, ...] = "full"  # as in LanguageConfig
    expert_dropout: float = 0.0  # on the experts' hidden units
    drop_path: float = 0.1  # stochastic depth rate of the last block; rises linearly from 0
    init_std: float = 0.02  # for linear weights, experts, position embeddings and class token
    label_smoothing: float = 0.0  # in training

    def __post_init__(self) -> None:
        check_counts(
            self,
            *("image_size", "channels", "num_classes", "patch", "dim", "depth", "heads"),
            *("mlp_ratio", "moe_blocks", "num_experts"),
        )
        check_shares(self, "expert_dropout", "drop_path", "label_smoothing")
        check_positive(self.init_std, "init_std")
        check(
            self.image_size % self.patch == 0,
            f"image_size={self.image_size} does not split into patches of {self.patch}; make it a "
            "multiple",
        )
        check_heads(self.dim, self.heads)
        check(
            self.moe_blocks <= self.depth,
            f"moe_blocks={self.moe_blocks} exceeds depth={self.depth}; lower moe_blocks",
        )
        check_router_type(self.router)
        base = base_router(self.router)
        check(
            isinstance(base, SoftConfig),
            f"router={base.name!r} chooses experts; a softmoe model takes 'soft' or "
            "AdaptiveConfig(base=SoftConfig(), mix=8)",
        )

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch) ** 2

    def is_moe(self, block: int) -> bool:
        return block >= self.depth - self.moe_blocks


VisionConfig = SwinConfig | SoftViTConfig


def _nearest(side: int, fits: Callable[[int], bool]) -> int:
    """Return the number nearest to `side` for which `fits` is true."""
    either_way = (near for far in count(1) for near in (side + far, side - far) if near > 0)
    return next(near for near in either_way if fits(near))
