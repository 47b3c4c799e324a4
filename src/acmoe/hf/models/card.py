"""The model card, README.md of an exported run: where it comes from and what was measured."""

from typing import Any

import acmoe
from acmoe.config.serialize import encode
from acmoe.evaluate.environment import code_commit
from acmoe.evaluate.run import CONFIG, LANGUAGE_RUN, read_json
from acmoe.hf.models.source import FINETUNED, Source

TASKS = {LANGUAGE_RUN: "text-generation", FINETUNED: "text-classification"}
AUTO = {
    "text-generation": ("AutoModelForCausalLM", "AutoTokenizer"),
    "text-classification": ("AutoModelForSequenceClassification", "AutoTokenizer"),
    "image-classification": ("AutoModelForImageClassification", "AutoImageProcessor"),
}
_BOOKKEEPING = ("kind", "step", "seconds", "crc32")


def card_text(source: Source) -> str:
    """Return the card. Every figure is from the run's metrics.jsonl; what is absent is left out."""
    task = TASKS.get(source.kind, "image-classification")
    router = encode(source.model.config.library)["router"]["name"]
    return "\n".join(
        (
            *_header(task, router),
            f"# {source.run.folder.name}",
            "",
            f"A mixture-of-experts model of the library acmoe with the router `{router}`, exported "
            "from a training run. The licence is the library's.",
            "",
            "## Load",
            "",
            *_usage(task),
            "",
            "## Training and figures",
            "",
            *_table(_facts(source, router)),
            "",
            *_figures(source),
            "",
            f"The folder `acmoe` holds config, vocabulary and metrics of the run{_back(source)}.",
            "",
        )
    )


def _back(source: Source) -> str:
    """Say how the folder becomes a run again; finetuned ones cannot (restore.py)."""
    if source.kind == FINETUNED:
        return ""
    return "; `acmoe export THIS_FOLDER --to run OUT` makes a run folder of it again"


def _header(task: str, router: str) -> list[str]:
    """Return the front matter that the hub reads."""
    tags = ("acmoe", "moe", "mixture-of-experts", router)
    return [
        "---",
        "library_name: transformers",
        "license: apache-2.0",
        f"pipeline_tag: {task}",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
        "",
    ]


def _usage(task: str) -> list[str]:
    model, processor = AUTO[task]
    return [
        "```python",
        "import acmoe.hf  # pip install 'acmoe[hf]'; registers the model type `acmoe`",
        f"from transformers import {model}, {processor}, pipeline",
        "",
        f'model = {model}.from_pretrained("THIS_FOLDER")',
        f'processor = {processor}.from_pretrained("THIS_FOLDER")',
        f'run = pipeline("{task}", model="THIS_FOLDER")',
        "```",
    ]


def _facts(source: Source, router: str) -> dict[str, Any]:
    """Return the facts of the run that the card states."""
    parameters = sum(one.numel() for one in source.model.parameters())
    unit = "epoch" if source.kind == FINETUNED else "step"
    weights = "moving average of the weights" if source.ema else "weights"
    facts = {
        "kind of run": source.kind,
        "router": router,
        "parameters": f"{parameters:,}",
        "data": source.data,
        "length of the run": f"{source.steps} {source.unit}",
        "exported": f"{weights} after {unit} {source.step}",
        "trained with": f"acmoe {read_json(source.run.folder / CONFIG).get('acmoe', 'unknown')}",
        "exported with": f"acmoe {acmoe.__version__}",
    }
    commit = code_commit()
    return facts if commit is None else {**facts, "commit of the exporting code": commit}


def _figures(source: Source) -> list[str]:
    """Return the table of the checkpoint's validation, or a line that there was none."""
    found = source.figures()
    if not found:
        return [f"The run was not validated at step {source.step}: no figure is given."]
    what = "development sentences" if source.kind == FINETUNED else "validation split"
    of_weights = " The moving average was exported." if source.ema else ""
    shown = {
        name.replace("_", " "): f"{value:.4f}" if isinstance(value, float) else str(value)
        for name, value in found.items()
        if name not in _BOOKKEEPING and not isinstance(value, dict | list)
    }
    return [f"Measured on the {what} by the run itself:{of_weights}", "", *_table(shown)]


def _table(rows: dict[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
