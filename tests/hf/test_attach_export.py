"""Attached models under `torch.export`."""

import pytest
import torch
from attached import CLOSE, ids, logits, measured
from small_models import build
from torch import Tensor, nn
from torch.export import Dim, export

import acmoe
from acmoe import AdaptiveConfig
from acmoe.hf.adaptive import first_choice
from acmoe.hf.families import TupleReader
from slow_cases import mostly_slow

ANY = {0: Dim.AUTO, 1: Dim.AUTO}


class FirstChoice(nn.Module):
    """The first choice of each token, read from a router's output."""

    def forward(self, scores_BLE: Tensor, ids_BLK: Tensor) -> Tensor:
        return first_choice(*TupleReader()((scores_BLE, None, ids_BLK)))


def test_the_first_choice_is_exported_for_any_number_of_tokens() -> None:
    example = torch.randn(2, 6, 5), torch.randint(5, (2, 6, 2))
    program = export(FirstChoice(), example, dynamic_shapes=(ANY, ANY)).module()
    # Of experts 3 and 0 the first token prefers 3, of 1 and 2 the second token 1.
    scores = torch.tensor([[[1.0, 9.0, 0.0, 2.0, 0.0]], [[9.0, 2.0, 1.0, 9.0, 9.0]]])
    chosen = torch.tensor([[[3, 0]], [[1, 2]]])
    assert (
        program(scores.repeat(2, 3, 1), chosen.repeat(2, 3, 1)).tolist() == [3, 3, 3, 1, 1, 1] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["running", "batch"])
def test_an_exported_model_takes_other_numbers_of_sequences_and_tokens(mode: str) -> None:
    if mode == "running":
        model = measured()
    else:
        model = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics=mode))
    program = export(model, (ids(2, 6),), {"use_cache": False}, dynamic_shapes=(ANY, None))
    other = ids(3, 11, seed=8)
    exported = program.module()(other, use_cache=False).logits
    torch.testing.assert_close(exported, logits(model, input_ids=other), **CLOSE)


@mostly_slow("mode", ["running", "prefix"], keep=[1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_model_takes_other_numbers_of_sequences_and_tokens(mode: str) -> None:
    model = measured(statistics=mode)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(input_ids=tokens, use_cache=False, return_dict=False)[0]

    traced = torch.jit.trace(Logits().eval(), (ids(2, 6),), check_trace=False)
    other = ids(3, 11, seed=8)
    torch.testing.assert_close(traced(other), logits(model, input_ids=other), **CLOSE)
