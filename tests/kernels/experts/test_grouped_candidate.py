"""torch's grouped GEMM as a candidate for each GEMM of the experts, beside Triton's and Hopper's.

Without a GPU torch computes it on the CPU, which is said to be a Hopper card here.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from acmoe.ops.experts.grouped_mm import rows_by_torch, weights_by_torch
from acmoe.ops.experts.settings import lookup, tables
from acmoe.ops.experts.settings.gemms import GROUPED_MM, PipelineConfig
from acmoe.ops.sort import sort_rows

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm"
)

N, D, F, E, END = 40, 16, 24, 4, 36  # expert 1 has no row, the last four rows no expert
OFFSETS = (7, 7, 20, END)


def drawn(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def test_its_products_are_those_of_a_float64_loop(device: str) -> None:
    torch.manual_seed(0)
    a, p = drawn(N, D, device=device), drawn(N, F, device=device)
    weight = drawn(E, F, D, device=device)
    offsets = torch.tensor(OFFSETS, device=device)
    wide = weight.double()
    rows = rows_by_torch(a, weight, offsets)
    across = rows_by_torch(a, weight.mT.contiguous(), offsets, across=True)
    gradient = weights_by_torch(p, a, offsets)
    assert gradient.shape == (E, F, D) and (gradient[1] == 0).all()
    begin = 0
    for e, end in enumerate(OFFSETS):
        own = slice(begin, end)
        wanted = a[own].double() @ wide[e].T
        for found in (rows[own], across[own]):
            torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-2)
        product = p[own].double().T @ a[own].double()
        torch.testing.assert_close(gradient[e].double(), product, rtol=2**-8, atol=1e-2)
        begin = end


@pytest.fixture
def inputs(device: str) -> Any:
    """Experts of 16 bits, tokens of which two have no expert."""
    from acmoe.ops.experts.tune.inputs import Inputs

    torch.manual_seed(0)
    ids = torch.rand(20, 3).topk(2).indices
    ids[:2] = 3
    x, up = drawn(20, 32, device=device), drawn(3, 64, 32, device=device) / 6
    down = drawn(3, 32, 32, device=device) / 6
    gate = torch.rand(20, 2, device=device).bfloat16()
    rows = sort_rows(ids.to(device), 3)
    return Inputs(x, up, down, None, None, gate, rows, "swiglu", torch.bfloat16)


@pytest.mark.parametrize("kernel", ["down", "input", "down_weight", "up_weight"])
def test_a_gemm_runs_on_it_and_agrees_with_triton(
    kernel: str, inputs: Any, fresh_choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acmoe.ops.experts.tune.calls import backward_calls, forward_calls
    from acmoe.ops.experts.tune.search import copying, trying

    monkeypatch.setattr(fresh_choice, "_torch_unsupported", lambda *where: None)
    used = []
    for name in ("rows_by_torch", "weights_by_torch"):
        run = getattr(fresh_choice, name)

        def noted(*arguments: Any, run: Any = run, **options: Any) -> Any:
            used.append(run)
            return run(*arguments, **options)

        monkeypatch.setattr(fresh_choice, name, noted)
    build = forward_calls if kernel == "down" else backward_calls
    call = build(inputs)[kernel]
    with copying(True, True):
        with trying(kernel, lookup.blocks_for(kernel, inputs.sizes.layer(torch.bfloat16))):
            (wanted,) = call()
        assert not used
        with trying(kernel, GROUPED_MM):
            (found,) = call()
    assert len(used) == 1
    end = int(inputs.rows.offsets[-1]) if found.dim() == 2 else None
    torch.testing.assert_close(found[:end], wanted[:end], rtol=2**-7, atol=1e-2)


def test_it_is_refused_where_it_would_be_wrong_or_wait(
    inputs: Any, fresh_choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = torch.device("cuda", 0)
    major = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))

    def reason(kernel: str, *, gather: bool = False, bare: bool = True, experts: int = 3) -> Any:
        size = inputs.sizes._replace(experts=experts)
        where = (kernel, size, torch.bfloat16, card)
        return fresh_choice._settings_unsupported(GROUPED_MM, *where, gather, bare, None)

    assert reason("down") is None and reason("up_weight") is None
    assert "no activation" in reason("hidden") and "bias" in reason("down", bare=False)
    assert "gather" in reason("up_weight", gather=True)
    assert "1024 groups, not 1025" in reason("down", experts=1025)
    major[0] = 10  # pytorch/pytorch#172439
    assert reason("down") is None and "Hopper" in reason("up_weight")
    major[0] = 8
    assert "Hopper" in reason("down")


def test_a_table_may_name_it() -> None:
    assert tables.is_row("pipeline_down/8/8/2", ["torch", 0])
    assert tables.is_row("pipeline_up_weight/8/8/2", list(GROUPED_MM))
    assert not tables.is_row("pipeline_hidden/8/8/2", ["torch", 0])
    assert not tables.is_row("pipeline_down/8/8/2", list(PipelineConfig("torch", 3)))


def test_the_tuning_at_first_use_tries_it() -> None:
    from acmoe.ops.experts.settings.rules import Layer
    from acmoe.ops.experts.tune.candidates import quick

    layer = Layer(2048, 1408, 64, 2816, rows=2048)
    for kernel in ("down", "input", "down_weight", "up_weight"):
        assert GROUPED_MM in quick(kernel, layer, tma=True)
    assert all(GROUPED_MM not in quick(kernel, layer, tma=True) for kernel in ("up", "hidden"))
