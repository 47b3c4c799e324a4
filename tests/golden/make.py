"""Write the golden folder of one version; tests/test_golden_run.py reads it.

`make golden` runs this file in the new folder tests/golden/VERSION. By hand, in an empty folder:

    PYTHONPATH=/path/to/the/version/src python /path/to/make.py

It uses the command line and names of the public API alone, so that any version can run it. The
golden folders stay as they are when the library changes: that is their purpose.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import acmoe

# No dropout and no noise: their random numbers are not the same on every CPU.
LANGUAGE = (
    "switch-nano-acmoe model.dim=8 model.heads=2 model.hidden=16 model.repeats=3 model.span=12 "
    "model.block=16 model.num_experts=4 model.router.momentum=0.9 data.name=bytes "
    "data.folder=corpus/bytes steps=8 batch=4 split=2 warmup=2 log_every=1 eval_every=4 "
    "eval_batch=2 eval_tokens=200 checkpoint_every=4 keep=2 device=cpu"
)
SWIN = (
    "swin-nano-acmoe model.image_size=8 model.patch=2 model.dim=8 model.depths=4,2 model.heads=2,4 "
    "model.position=table model.moe_stages=0,1 model.adaptive_stage=0 model.num_experts=4 "
    "model.router.base.noise=0 model.router.momentum=0.9 data.size=8 data.threads=1 "
    "augment.shift=1 steps=8 batch=16 split=2 warmup=2 log_every=1 eval_every=4 eval_images=40 "
    "checkpoint_every=4 keep=2 device=cpu"
)
TOKENS = [[(7 * n + 3 * row) % 96 + 32 for n in range(12)] for row in range(2)]


def command(*arguments: str) -> str:
    """Run the command line of the version that runs this file; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "acmoe", *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


def make_corpus() -> None:
    """About 1,500 bytes; 80 % of them are for training."""
    text = "".join(f"line {n}: {n} and {n} make {2 * n}.\n" for n in range(50))
    Path("source.txt").write_text(text)
    command("data", "prepare", "bytes", "--from", "source.txt", "--root", "corpus")
    Path("source.txt").unlink()


def make_run(name: str, settings: str) -> dict[str, Any]:
    """Train 8 steps, remember what they gave, and leave the folder as it was after 4."""
    command("train", *settings.split(), "--out", name)
    folder = Path(name)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    early = [line for line, record in zip(lines, records, strict=True) if record["step"] <= 4]
    final = json.loads(command("evaluate", name, "--which", "last", "--json", "--device", "cpu"))
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (folder / "metrics.jsonl").write_text("".join(early))
    (folder / "lock").unlink()
    halfway = json.loads(command("evaluate", name, "--which", "last", "--json", "--device", "cpu"))
    return {"records": records, "final": final, "halfway": halfway}


def logits(folder: str, inputs: torch.Tensor) -> list[list[float]]:
    """Return the logits of images, or those of each text's last token, which reads the others."""
    with torch.no_grad():
        found = acmoe.load(folder).eval()(inputs).logits
    rows = (found if found.dim() == 2 else found[:, -1]).tolist()
    return [[round(value, 7) for value in row] for row in rows]


def images() -> torch.Tensor:
    """(2, 3, 8, 8) numbers that need no random generator."""
    return torch.sin(torch.arange(2 * 3 * 8 * 8).float()).view(2, 3, 8, 8)


def make_models() -> dict[str, Any]:
    """Save small models with other statistics; return their logits."""
    found = {}
    for name, options in {
        "prefix": {"statistics": "prefix"},
        "mix": {"statistics": "batch", "mix": 2, "strength": 0.5},
    }.items():
        torch.manual_seed(0)
        router = acmoe.AdaptiveConfig(**options)
        sizes = {"dim": 8, "heads": 2, "hidden": 8, "repeats": 2, "span": 8, "block": 8}
        model = acmoe.create_model("switch-nano", router=router, num_experts=4, **sizes)
        for _ in range(3):  # so that running statistics are not empty
            model(torch.tensor(TOKENS))
            acmoe.fold_statistics(model)
        acmoe.save(model, f"models/{name}")
        found[name] = {"logits": logits(f"models/{name}", torch.tensor(TOKENS))}
    return found


def main() -> None:
    make_corpus()
    expected: dict[str, Any] = {
        "version": acmoe.__version__,
        "tokens": TOKENS,
        "models": make_models(),
    }
    expected["language"] = make_run("language", LANGUAGE)
    expected["swin"] = make_run("swin", SWIN)
    halfway = "checkpoints/step-00000004"
    expected["language"]["logits"] = logits(f"language/{halfway}", torch.tensor(TOKENS))
    expected["swin"]["logits"] = logits(f"swin/{halfway}", images())
    Path("expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
