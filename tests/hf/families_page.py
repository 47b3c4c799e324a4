"""Write docs/huggingface-families.md from tiny models of every family: run this file.

PYTHONPATH=src python tests/hf/families_page.py > docs/huggingface-families.md
"""

import transformers
from small_models import FAMILIES, build
from transformers import PreTrainedModel
from transformers.utils import logging

from acmoe.errors import UserError
from acmoe.hf.discovery import RouterStack, find_stacks

# Remarks that `attach` does not log, because they concern no result that one would expect.
REMARKS = {
    "deepseek_v4": "routers that look up experts by token id (`DeepseekV4HashRouter`) are not "
    "rescaled; their choices are the clusters of the next layer",
    "jetmoe": "only the router of the feed-forward experts; the attention's experts keep theirs",
    "llama4": "returns no ids; the first choice is the highest logit",
    "longcat_flash": "experts that copy their token are clusters of their own",
    "deepseek_ocr2": "PEFT does not find the adapters of the whole model again, plain or attached",
    "mistral_large4": "PEFT does not find adapters of experts again, plain or attached",
    "nllb_moe": "a token beyond an expert's capacity still counts to the cluster of its choice; in "
    "training set `layerdrop = 0.0` on encoder and decoder; `torch.compile` is refused",
    "phimoe": "in training its choice is sampled",
    "switch_transformers": "a token beyond an expert's capacity still counts as for nllb_moe",
    "unlimited_ocr": "see deepseek_ocr2",
}

HEAD = """\
# HuggingFace families

This page lists the model families of transformers that `acmoe.attach` was tested with, and says how
to add one. `attach` finds the MoE routers of a model from what the model declares: the entry
`_can_record_outputs["router_logits"]` names the router class and the place of its logits. If a
model declares none, a class named `...TopKRouter` counts. There is no list of models, so a family
that is new in transformers works if it follows the convention. `acmoe.hf.families` describes the
few that do not, and `acmoe.hf.register_family` adds one:

```python slow
from acmoe.hf import register_family

register_family("MyRouter", scores=1, ids=0)  # a router that returns (ids, logits)
register_family("Linear", ends_with="mlp.gate")  # an nn.Linear of this name, which returns logits
```

The router must be a module of its own: the input of a product that is written in the code of the
block cannot be rescaled from outside. The `forward` of such a model must take `**kwargs` and pass
them on to each of its layers, as transformers' own models do: in them the layers get the record of
the call.

This page is written by `PYTHONPATH=src python tests/hf/families_page.py >
docs/huggingface-families.md` from tiny random models, which
`pytest -m slow tests/hf/test_discovery.py` runs with text:

- every router is called once, and its layers get the arguments of their stack;
- the scores equal the router logits that transformers records (hash routers are not recorded);
- where the router returns ids, the expert with the largest weight has the highest score among the
  chosen (not tested for phimoe, which normalises each of its weights by itself).

These hold for every family (`pytest -m slow tests/hf`; Qwen3-Omni's talker, which reads no token
ids, is only found and saved):

- a fresh attach gives bitwise the logits of the plain model, in float32 and in bfloat16; `detach`
  gives them back; `save_pretrained` and `from_pretrained` keep every bit;
- a training step has finite gradients and updates the statistics, and gradient checkpointing
  changes no gradient (JetMoE has none);
- with `running` and `prefix` statistics no token sees a later one or another sequence (but for
  diffusion_gemma and openai_privacy_filter, which are not causal);
- `set_experts_implementation("acmoe")` gives the logits of "eager". Where the remark says **own
  experts**, transformers passes no implementation on to the model's experts, and nothing changes.

Decoding with a cache and beam search are tested for 15 families, left padding for 13 of these, and
`torch.compile` and LoRA for Mixtral.

Models of text and images were tested by their text model. `tests/hf/test_attach_images.py` calls
the whole models of gemma4, glm4v_moe, llama4, qwen3_5_moe, qwen3_vl_moe and qwen4_exp with images.
Padding is read from a 2-D `attention_mask`, or from the dict of masks that gemma4 and inkling make
of it; with `flex_attention` their training is refused.
"""


OLDER = """\
Under transformers 5.17 also aria (its router is a plain `nn.Linear` that no model declares;
`register_family("Linear", ends_with="mlp.router")` names it), and longcat_flash and
switch_transformers (their routers return no logits there; the first forward pass raises)."""


def classes(stacks: list[RouterStack]) -> str:
    routers = [router.module for stack in stacks for router in stack.routers]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(type(m).__name__ for m in routers))


def remark(name: str, model: PreTrainedModel, stacks: list[RouterStack]) -> str:
    notes = dict.fromkeys(router.note for stack in stacks for router in stack.routers)
    warnings = [f"**warned:** {note}" for note in notes if note is not None]
    experts = [] if model._can_set_experts_implementation() else ["**own experts**"]
    return "; ".join([*warnings, *([REMARKS[name]] if name in REMARKS else []), *experts])


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
            rows.append(
                f"| {family} | {built} | {classes(stacks)} | {remark(name, model, stacks)} |"
            )
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
