"""Train a small Swin-MoE on the digits 0 to 4, finetune it on 5 to 9, and attack it.

The plain and the adaptive router train from the same weights, on the same images in the same order.
The images are the 8 x 8 scans that come with scikit-learn: pip install 'acmoe[vision]'.
It takes about 30 seconds on one CPU core. One seed of a short run does not say which router is
better.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import acmoe
from acmoe.attacks.attack import perturb
from acmoe.attacks.target import Target, white_box
from acmoe.config.images.attack import FGSMConfig, PGDConfig
from acmoe.config.images.data import DIGITS_MEAN, DIGITS_STD
from acmoe.data.images.digits import load_digit_splits
from acmoe.data.images.splits import ImageSet

CLASSES, BATCH, EPS = 5, 32, 8 / 255
SIZES = {
    "image_size": 8,
    "patch": 2,
    "dim": 32,
    "depths": (4,),
    "heads": (2,),
    "moe_stages": (0,),
    "adaptive_stage": 0,
    "num_experts": 4,
    "window": 4,
    "num_classes": CLASSES,
    "init_std": 0.05,
    "drop_path": 0.0,
    "expert_dropout": 0.0,
    "capacity_factor": None,  # drop no token, so that no image of a batch changes another's score
}
ATTACKS = {"fgsm": FGSMConfig(), "pgd": PGDConfig(steps=10, step_size=0.25)}

Images = tuple[Tensor, Tensor]  # uint8 (N, 3, 8, 8), and labels from 0 to 4 (N,)


def digits(images: ImageSet, first: int) -> Images:
    """Return the images of the classes first, ..., first + 4."""
    labels = torch.as_tensor(images.labels)
    chosen = ((labels >= first) & (labels < first + CLASSES)).nonzero().flatten().tolist()
    pixels = torch.stack([torch.as_tensor(images.pixels(index)) for index in chosen])
    return pixels.permute(0, 3, 1, 2).contiguous(), labels[chosen] - first


def target_of(model: nn.Module) -> Target:
    """Return the function from images in [0, 1] to logits; it normalises the images first."""
    return Target(model, mean=DIGITS_MEAN, std=DIGITS_STD)


def train(model: nn.Module, data: Images, steps: int, lr: float) -> None:
    """Train by an ordinary loop. Nothing in it depends on the router."""
    torch.manual_seed(1)
    images, labels = data
    x = (images.float() / 255 - DIGITS_MEAN[0]) / DIGITS_STD[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,))
        output = model(x[batch], labels[batch])
        optimizer.zero_grad()
        (output.loss + output.aux_loss).backward()
        optimizer.step()  # also updates the running statistics of the adaptive routers
        schedule.step()


def accuracies(model: nn.Module, data: Images) -> dict[str, float]:
    """Return the percentage of correct images: clean, and after each attack of radius EPS."""
    target, (images, labels) = target_of(model), data
    found = {}
    with white_box(model):  # evaluation mode; the attack's gradients also see the scale M
        x = target.enter(images)
        attacked = {"clean": x} | {
            name: perturb(target, x, labels, EPS, attack, seed=0)
            for name, attack in ATTACKS.items()
        }
        with torch.no_grad():
            for name, moved in attacked.items():
                found[name] = 100 * (target(moved).argmax(1) == labels).float().mean().item()
    return found


def finetuned(router: str, train_set: ImageSet, steps: int) -> nn.Module:
    """Train on the digits 0 to 4, save, load, replace the head, train on 5 to 9."""
    torch.manual_seed(0)
    model = acmoe.create_model("swin-nano", router=router, **SIZES)
    train(model, digits(train_set, first=0), steps, lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        acmoe.save(model, Path(folder, "pretrained"))
        model = acmoe.load(Path(folder, "pretrained"))
    model.new_head(CLASSES)
    train(model, digits(train_set, first=CLASSES), steps, lr=5e-3)
    return model


def main(steps: int = 120) -> dict[str, dict[str, float]]:
    """Return the accuracies in percent by router ("smoe" is the plain one) and by attack."""
    splits = load_digit_splits(size=8)
    test_set = digits(splits.test, first=CLASSES)
    return {
        router: accuracies(finetuned(router, splits.train, steps), test_set)
        for router in ("smoe", "adaptive")
    }


if __name__ == "__main__":
    found = main()
    print("accuracy in percent on test images of the digits 5 to 9; attacks of radius 8/255")
    print("router   " + "".join(f"{name:>8}" for name in found["smoe"]))
    for router, row in found.items():
        print(f"{router:9}" + "".join(f"{value:8.1f}" for value in row.values()))
