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

This page lists the model families of transformers that `acmoe.attach` was tested with, by tiny
random models. If your family is not listed, try `acmoe.attach(model)`: it finds the routers of
most MoE models by itself, or says in one line why it cannot. [Add a family](#add-a-family) tells
it where the routers are, and [What was tested](#what-was-tested) says what holds for each family.

In the column "remark", **warned** means that `attach` logs the remark as a warning. **Own
experts** means that transformers passes no experts implementation on to the model's experts, so
that `set_experts_implementation("acmoe")` changes nothing.
"""

OLDER = """\
Transformers 5.17 has three more families that cannot be attached as they are. The router of aria
is a plain `nn.Linear` that no model declares;
`register_family("Linear", ends_with="mlp.router")` names it. The routers of longcat_flash and
switch_transformers return no logits there, and the first forward pass raises an error."""

ADD = """\
## Add a family

`attach` finds the MoE routers of a model from what the model declares: the entry
`_can_record_outputs["router_logits"]` names the router class and the place of its logits. If a
model declares none, a class named `...TopKRouter` counts. There is no list of models, so a new
family works if it follows this convention. `acmoe.hf.families` describes the few that do not, and
`acmoe.hf.register_family` adds one:

```python slow
from acmoe.hf import register_family

register_family("MyRouter", scores=1, ids=0)  # a router that returns (ids, logits)
register_family("Linear", ends_with="mlp.gate")  # an nn.Linear of this name, which returns logits
```

Two conditions must hold:

- The router is a module of its own. If the block multiplies by the router's weight itself, nothing
  can rescale the input of that product from outside.
- The `forward` of the model takes `**kwargs` and passes them on to each of its layers, as
  transformers' own models do. `attach` hands the record of a call to the layers in this way.

## What was tested

`PYTHONPATH=src python tests/hf/families_page.py > docs/huggingface-families.md` writes this page.
`pytest -m slow tests/hf/test_discovery.py` runs its models with text and checks their routers:

- Every router is called once, and its layers get the arguments of their stack.
- The scores equal the router logits that transformers records (hash routers are not recorded).
- If the router returns ids, the expert with the largest weight has the highest score among the
  chosen. This is not tested for phimoe, which normalises each of its weights by itself.

`pytest -m slow tests/hf` checks the following for every family. The exception is Qwen3-Omni's
talker, which reads no token ids: it is only found and saved.

- A fresh attach gives bitwise the logits of the plain model, in float32 and in bfloat16, and so
  does `detach`. `save_pretrained` and `from_pretrained` keep every bit.
- A training step has finite gradients and changes the statistics. Gradient checkpointing changes
  no gradient (JetMoE has no gradient checkpointing).
- With `running` and `prefix` statistics no token depends on a later one or on another sequence.
  diffusion_gemma and openai_privacy_filter are not causal themselves.
- `set_experts_implementation("acmoe")` gives the logits of "eager".

Some tests cover a part of the families:

- Decoding with a cache and beam search are tested for 15 families, left padding for 13 of these,
  and `torch.compile` and LoRA for Mixtral.
- Models of text and images were tested by their text model. `tests/hf/test_attach_images.py` calls
  the whole models of gemma4, glm4v_moe, llama4, qwen3_5_moe, qwen3_vl_moe and qwen4_exp with
  images.
- Padding is read from a 2-D `attention_mask`, or from the dict of masks that gemma4 and inkling
  make of it. With `flex_attention`, training of these two is refused."""


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
            ADD,
            "",
        ]
    )


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(page(), end="")
