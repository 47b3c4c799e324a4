"""Write docs/huggingface-families.md from tiny models of every family: run this file.

PYTHONPATH=src python tests/hf/families_page.py > docs/huggingface-families.md
"""

import transformers
from small_models import FAMILIES, build
from transformers.utils import logging

from acmoe.errors import UserError
from acmoe.hf.discovery import RouterStack, find_stacks

# Remarks that `attach` does not log, because they concern no result that one would expect.
REMARKS = {
    "deepseek_v4": "routers that look up the experts of a token id (`DeepseekV4HashRouter`) only "
    "tell their clusters",
    "jetmoe": "only the router of the feed-forward experts; the attention's experts keep theirs",
    "llama4": "returns no ids; the first choice is the highest logit",
    "longcat_flash": "experts that copy their token are clusters of their own",
    "nllb_moe": "a token beyond an expert's capacity still counts to the cluster of its choice",
    "phimoe": "in training its choice is sampled",
    "switch_transformers": "see nllb_moe",
}

HEAD = """\
# HuggingFace families

`acmoe.attach(model)` finds the MoE routers of a transformers model from what the model declares:
the entry `_can_record_outputs["router_logits"]` names the router class and the place of its logits.
Where a version declares none, a class named `...TopKRouter` counts. There is no list of models, so
a family that is new in transformers works if it follows the convention. `acmoe.hf.families` holds
the few that do not, and `acmoe.hf.register_family` adds one:

```python slow
from acmoe.hf import register_family

register_family("MyRouter", scores=1, ids=0)  # a router that returns (ids, logits)
```

This page is written by `PYTHONPATH=src python tests/hf/families_page.py >
docs/huggingface-families.md` from tiny random models, which
`pytest -m slow tests/hf/test_discovery.py` runs with text:

- every router is called once, and its layers get the arguments of their stack;
- the scores equal the router logits that transformers records (hash routers are not recorded);
- where the router returns ids, the expert with the largest weight has the highest score among the
  chosen (not tested for phimoe, which normalises each of its weights by itself).

Models of text and images were tested by their text model, and qwen3_vl_moe and diffusion_gemma as a
whole. Calls with images were not tested.
"""


OLDER = """\
Under transformers 5.17 also aria (its router is a plain `nn.Linear` that no model declares;
`register_family("Linear", ends_with="mlp.router")` names it), and longcat_flash and
switch_transformers (their routers return no logits there; the first forward pass raises)."""


def classes(stacks: list[RouterStack]) -> str:
    routers = [router.module for stack in stacks for router in stack.routers]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(type(m).__name__ for m in routers))


def remark(name: str, stacks: list[RouterStack]) -> str:
    notes = dict.fromkeys(router.note for stack in stacks for router in stack.routers)
    warnings = [f"**warned:** {note}" for note in notes if note is not None]
    return "; ".join([*warnings, *([REMARKS[name]] if name in REMARKS else [])])


def page() -> str:
    """The page for the installed version of transformers."""
    rows, refused = [], []
    for name in sorted(FAMILIES):
        model = build(name)
        built = f"`{type(model).__name__}`"
        try:
            stacks = find_stacks(model)
        except UserError as error:
            refused.append(f"| {name} | {built} | {error} |")
        else:
            family = name.split(".")[0]
            rows.append(f"| {family} | {built} | {classes(stacks)} | {remark(name, stacks)} |")
    families = {name.split(".")[0] for name in FAMILIES}
    found = f"{len(families) - len(refused)} of {len(families)} families"
    return "\n".join(
        [
            HEAD,
            f"## transformers {transformers.__version__}: {found}",
            "",
            "| family | tested model | router | remark |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Refused",
            "",
            OLDER,
            "",
            "| family | tested model | what `attach` says |",
            "|---|---|---|",
            *refused,
            "",
        ]
    )


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(page(), end="")
