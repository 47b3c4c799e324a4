"""Images: Swin-MoE with one and two experts a token, and SoftMoE, on Imagenette."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from acmoe.config.attack import AttackConfig, SPSAConfig, attack_config
from acmoe.config.image_data import ImageDataConfig
from acmoe.config.routing import AdaptiveConfig, MetricConfig, RouterConfig
from acmoe.config.train_vision import VisionRunConfig, override_vision_run
from acmoe.config.vision import SwinConfig
from acmoe.config.vision_models import vision_router
from acmoe.recipes import recipe
from acmoe.study.cell import Cell, ImageTests
from acmoe.study.materials import Images, Materials
from acmoe.study.size import Size

STEPS = 2000
ATTACKED, SPSA_ATTACKED = 512, 32  # images

METRIC = MetricConfig(gate="all", noise=1.0)  # beside Swin-MoE's noisy gate

SETTINGS = {
    "swin, one expert": ("swin-imagenette", 1),
    "swin, two experts": ("swin-imagenette", 2),
    "softmoe": ("softmoe-imagenette", None),
}


def vision_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Clean accuracy, and under attack as a careful adversary and as the paper's code would."""
    images, tests = materials.images(), image_tests(size)
    cells = []
    for setting, (name, top_k) in SETTINGS.items():
        soft = top_k is None
        published = AdaptiveConfig.preset("reference-soft" if soft else "reference-swin")
        routers: dict[str, str | RouterConfig] = {
            "smoe": "smoe",
            "adaptive-previous": "adaptive",
            "published": published,
        }
        if not soft:
            routers["metric"] = METRIC
        for seed, (condition, router) in product(seeds, routers.items()):
            run = image_run(name, router, images, size, seed, top_k)
            cells.append(
                Cell(
                    study="vision",
                    setting=setting,
                    condition=condition,
                    factors={"model": name, **({} if top_k is None else {"top_k": top_k})},
                    seed=seed,
                    size=f"{run.steps:,} steps of {run.batch} images",
                    data=images.fingerprint,
                    config=run,
                    tests=tests,
                )
            )
    return cells


def image_run(
    name: str,
    router: str | RouterConfig,
    images: Images,
    size: Size,
    seed: int,
    top_k: int | None,
) -> VisionRunConfig:
    """The recipe's model and augmentation over so many steps, on the arrays of pixels."""
    run, steps = recipe(name), size.steps or STEPS
    assert isinstance(run, VisionRunConfig)
    model = replace(
        run.model,
        image_size=images.size,
        num_classes=images.classes,
        router=vision_router(router, run.model),
    )
    if isinstance(model, SwinConfig) and top_k is not None:
        model = replace(model, top_k=top_k)
    run = replace(
        run,
        model=model,
        data=ImageDataConfig(
            name="arrays",
            source=str(images.folder),
            size=images.size,
            resize=images.size,
            holdout=0.1,
        ),
        epochs=None,
        steps=steps,
        warmup=steps // 20,
        batch=size.batch or run.batch,
        precision="bf16",
        seed=seed,
        log_every=max(1, min(50, steps // 10)),
        eval_every=max(1, steps // 8),
        eval_batch=128,
        checkpoint_every=steps,
        device=size.device,
    )
    return override_vision_run(run, size.overrides)


def image_tests(size: Size) -> ImageTests:
    """FGSM, PGD over radii, and SPSA on fewer images; in both presets."""
    if size.brief:
        return ImageTests()
    limit, few = size.images or ATTACKED, size.spsa_images or SPSA_ATTACKED
    radii = tuple(level / 255 for level in (1, 2, 3, 4, 5))
    attacks = []
    for preset in ("default", "paper"):
        attacks += [
            replace(attack_config("fgsm", preset=preset), limit=limit, batch=128),
            replace(attack_config("pgd", preset=preset, eps=radii), limit=limit, batch=128),
            _spsa(preset, few),
        ]
    return ImageTests(attacks=tuple(attacks))


def _spsa(preset: str, few: int) -> AttackConfig:
    """Eight copies of the batch in a pass: a gradient takes 256."""
    usual = attack_config("spsa", preset=preset)
    eps = usual.eps[-1:]  # the larger of the default's two radii
    return replace(usual, attack=SPSAConfig(copies=8), eps=eps, limit=few, batch=few)
