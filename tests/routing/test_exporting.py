"""A layer must tell an export from a compilation: only the latter sorts tokens and is counted."""

import pytest
import torch
from torch import Tensor, nn

from acmoe.ops.exporting import exporting


class Answer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if exporting() else x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_is_no_export(backend: str) -> None:
    compiled = torch.compile(Answer(), backend=backend, fullgraph=True)
    assert compiled(torch.zeros(())) == 0


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_one(strict: bool) -> None:
    program = torch.export.export(Answer(), (torch.zeros(()),), strict=strict)
    assert program.module()(torch.zeros(())) == 1
    assert Answer()(torch.zeros(())) == 0
