"""Images: Swin-MoE with one and two experts per token, and SoftMoE, on Imagenette."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from acmoe.config.images.attack import PGDConfig, SPSAConfig, attack_config
from acmoe.config.images.data import AugmentConfig, ImageDataConfig
from acmoe.config.images.presets import vision_router
from acmoe.config.images.train import VisionRunConfig, override_vision_run
from acmoe.config.images.vision import SwinConfig
from acmoe.config.routing import MetricConfig, RouterConfig
from acmoe.lab.study.cell import Cell, ImageTests
from acmoe.lab.study.grids.grid import Setting, as_recorded, grid_cells
from acmoe.lab.study.materials import Images, Materials
from acmoe.lab.study.size import Size
from acmoe.recipes import recipe

STEPS = 600
# Number of attacked images; every cell attacks the same ones.
ATTACKED, SPSA_ATTACKED = 256, 32
ATTACK_BATCH = 256  # most images at once: the activations of ten parallel cells fit on one GPU
PGD_RADII = (1, 2, 4)  # in 255ths of pixel values; the paper's attack has one radius
# The paper takes 20 steps of 0.15: the same total length in twice the time.
PGD = PGDConfig(steps=10, step_size=0.3)
# 256 model outputs per image. The usual 20 steps of 128 directions need 5,120, too many for this
# study. All directions of a step are one forward pass.
SPSA = SPSAConfig(steps=8, directions=16, copies=16)

METRIC = MetricConfig(gate="all", noise=1.0)  # gate and noise of Swin-MoE

SETTINGS = {
    "swin, one expert": ("swin-imagenette", 1),
    "swin, two experts": ("swin-imagenette", 2),
    "softmoe": ("softmoe-imagenette", None),
}


def vision_study(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return cells that measure accuracy on clean images and under our and the paper's attacks."""
    images, tests = materials.images(), image_tests(size)
    cells: list[Cell] = []
    for setting, (name, top_k) in SETTINGS.items():
        soft = top_k is None
        published = as_recorded("reference-soft" if soft else "reference-swin")
        routers: dict[str, str | RouterConfig] = {
            "smoe": "smoe",
            "adaptive-previous": "adaptive",
            "published": published,
        }
        if not soft:
            routers["metric"] = METRIC
        described = Setting(
            study="vision",
            name=setting,
            unit="images",
            data=images.fingerprint,
            tests=tests,
            factors={"model": name, **({} if top_k is None else {"top_k": top_k})},
        )
        make_run = partial(image_run, name, images, size, top_k)
        cells += grid_cells(described, routers, seeds, make_run)
    return cells


def image_run(
    name: str,
    images: Images,
    size: Size,
    top_k: int | None,
    router: str | RouterConfig,
    seed: int,
) -> VisionRunConfig:
    """Return a run of the recipe's model on arrays of pixels that stay on the device.

    Images are only cropped and mirrored. The recipe's RandAugment and mixing are meant for a
    hundred epochs, ten times as long as these runs, and need more CPU time than many parallel cells
    have.
    """
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
            on_device=True,
        ),
        augment=AugmentConfig.preset("crop"),
        epochs=None,
        steps=steps,
        warmup=steps // 20,
        batch=size.batch or run.batch,
        precision="bf16",
        seed=seed,
        log_every=max(1, min(50, steps // 10)),
        eval_every=max(1, steps // 6),
        eval_batch=256,
        eval_capacity="model",
        checkpoint_every=steps,
        device=size.device,
    )
    return override_vision_run(run, size.overrides)


def image_tests(size: Size) -> ImageTests:
    """Return FGSM, PGD over radii, and SPSA on fewer images, each in both presets."""
    if size.brief:
        return ImageTests()
    limit, few = size.images or ATTACKED, size.spsa_images or SPSA_ATTACKED
    batch, attacks = min(limit, ATTACK_BATCH), []
    for preset in ("default", "paper"):
        fgsm, pgd, spsa = (attack_config(name, preset=preset) for name in ("fgsm", "pgd", "spsa"))
        if preset == "default":
            pgd = replace(pgd, attack=PGD, eps=tuple(level / 255 for level in PGD_RADII))
        attacks += [
            replace(fgsm, limit=limit, batch=batch, precision="bf16"),
            replace(pgd, limit=limit, batch=batch, precision="bf16"),
            # Only the larger of the default's two radii.
            replace(spsa, attack=SPSA, eps=spsa.eps[-1:], limit=few, batch=few),
        ]
    # With the experts' capacity of training, as the paper attacks, and all cells so far.
    return ImageTests(attacks=tuple(replace(one, capacity="model") for one in attacks))
