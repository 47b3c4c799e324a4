"""Small trained models for the tests of `acmoe.hf.models`."""

import torch

import acmoe
from acmoe.models.text.decoder import LanguageModel

SIZES = {"repeats": 2, "dim": 16, "hidden": 16, "heads": 2, "span": 8, "block": 8}
IMAGE_SIZES = {"image_size": 8, "patch": 2, "dim": 8, "num_experts": 4}


def language_model(router: object = "adaptive", **sizes: object) -> LanguageModel:
    """A language model after one step, so that its running statistics are not empty."""
    torch.manual_seed(0)
    model = acmoe.create_model("switch-nano", router=router, **{**SIZES, **sizes})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(256, (4, 16))
    out = model.train()(tokens, tokens)
    (out.loss + out.aux_loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def wrapped(model: LanguageModel) -> torch.nn.Module:
    """The model behind transformers."""
    from acmoe.hf import AcmoeConfig, AcmoeForCausalLM

    return AcmoeForCausalLM(AcmoeConfig.of(model.config), model).eval()


def same_state(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Return True if two models have the same names, dtypes and bits."""
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])
        for name in ours
    )
