"""The Hopper GEMMs with a multistage TMA pipeline, emulated on a CPU, against float64 and Triton.

Gluon has no interpreter: tools/gluon_emulator runs the kernels' Python, with warps of different
roles as threads, and completes asynchronous copies and MMAs as late as it may.
D features, F hidden units, N rows, E experts; I, O inner and outer dimension of a product.
"""

import functools

import pytest
import torch
from test_expert_kernels import Layer

from slow_cases import mostly_slow

# Rows of each expert, and rows for none: a whole tile and a ragged one, none, half a tile, a tile
# and a ragged half.
COUNTS, NOBODY = (130, 0, 64, 200), 70


def noted(called, function):
    """The function, which leaves its name each time it is called."""

    @functools.wraps(function)
    def call(*arguments, **how):
        called.append(function.__name__)
        return function(*arguments, **how)

    return call


def drawn(*shape, device):
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def plan_of(counts, nobody, device, top_k=1):
    from acmoe.ops.experts.triton.tiles import Plan

    torch.manual_seed(0)
    end = torch.tensor(counts).cumsum(0)
    order = torch.randperm(int(end[-1]) + nobody)
    return Plan(order.to(device), end.to(device), top_k)


def each_expert(plan):
    begin = 0
    for expert, end in enumerate(plan.offsets.tolist()):
        yield expert, slice(begin, end)
        begin = end


def assert_near(found, right, most=4e-3):
    """bf16 keeps 8 bits: 2^-9 of a number are lost at most."""
    assert ((found.double() - right).norm() / right.norm()).item() < most


def assert_sums_of_experts(dw, p_NO, q_NI, plan, *, transposed=False):
    """dw[e] is p^T q over the rows of expert e, or its transpose; zeros for an expert without."""
    for expert, rows in each_expert(plan):
        right_OI = p_NO[rows].double().T @ q_NI[rows].double()
        if rows.start == rows.stop:
            assert not dw[expert].any()
        else:
            assert_near(dw[expert], right_OI.T if transposed else right_OI)


@mostly_slow(
    ("across", "inner", "outer", "settings"),
    [
        (True, 192, 256, ("ping-pong", 3)),
        (False, 192, 256, ("ping-pong", 6)),  # a tile has fewer K blocks than stages
        (True, 256, 512, ("cooperative", 3, 0, 2)),
        (False, 256, 256, ("cooperative", 4, 0, 0)),
        (False, 256, 256, ("cooperative", 4, 0, 3)),
        # Outer dimensions that are no multiple of a tile: the last one overlaps its neighbour.
        (True, 64, 208, ("ping-pong", 2)),
        (False, 256, 272, ("cooperative", 3, 0, 0)),
    ],
    keep=(0, 4),
)
def test_rows_gemms_by_a_pipeline_are_their_products(
    across, inner, outer, settings, device, hopper_launch
):
    from acmoe.ops.device.settings import PipelineConfig

    plan = plan_of(COUNTS, NOBODY, device)
    a_NI = drawn(plan.num_rows, inner, device=device)
    shape = (inner, outer) if across else (outer, inner)
    weight = drawn(len(COUNTS), *shape, device=device)
    y_NO = hopper_launch.launch_rows(a_NI, weight, plan, PipelineConfig(*settings), across=across)
    right_NO = torch.zeros(y_NO.shape, dtype=torch.float64, device=device)
    for expert, rows in each_expert(plan):
        w = weight[expert].double()
        right_NO[rows] = a_NI[rows].double() @ (w if across else w.T)
    routed = sum(COUNTS)
    assert_near(y_NO[:routed], right_NO[:routed])


@pytest.mark.parametrize("over", [False, True])
@mostly_slow(
    ("counts", "dim", "hidden", "settings"),
    [
        (COUNTS, 128, 256, ("ping-pong", 2, 2)),
        ((1, 256, 63), 192, 128, ("ping-pong", 4, 1)),
        ((130, 0, 70), 64, 192, ("ping-pong", 2, 2)),  # the last tile has one panel of two
        ((70,), 64, 64, ("ping-pong", 2, 1)),  # and the only one
    ],
    keep=(1,),
)
def test_the_activation_s_backward_behind_the_product(
    counts, dim, hidden, settings, over, device, hopper_launch
):
    from acmoe.ops.device.settings import PipelineConfig

    plan = plan_of(counts, NOBODY, device)
    x_ND = drawn(plan.num_rows, dim, device=device)
    down_EDF = drawn(len(counts), dim, hidden, device=device) / dim**0.5
    h_NW = drawn(plan.num_rows, 2 * hidden, device=device)
    gate_N = torch.rand(plan.num_rows, device=device)
    before_NW = h_NW.clone()
    dh_NW = h_NW if over else torch.zeros_like(h_NW)
    found_NF, share_BN = hopper_launch.launch_hidden(
        x_ND, down_EDF, h_NW, dh_NW, gate_N, plan, PipelineConfig(*settings)
    )

    # By autograd: the gradient by h of the sum of gate * (down a) * x.
    leaf_NW = before_NW.double().requires_grad_()
    g_NF, u_NF = leaf_NW.split(hidden, dim=1)
    a_NF = torch.nn.functional.silu(g_NF) * u_NF
    gate_N1 = gate_N[plan.permutation].double()[:, None].requires_grad_()
    routed = sum(counts)
    total = sum(
        (gate_N1[rows] * (a_NF[rows] @ down_EDF[expert].double().T) * x_ND[rows].double()).sum()
        for expert, rows in each_expert(plan)
    )
    right_NW, right_gate_N1 = torch.autograd.grad(total, (leaf_NW, gate_N1))
    assert_near(dh_NW[:routed], right_NW[:routed])
    assert_near(found_NF[:routed], (a_NF * gate_N1).detach()[:routed])
    assert_near(share_BN.sum(0)[:routed], right_gate_N1[:routed, 0], 1e-4)
    untouched = before_NW if over else torch.zeros_like(h_NW)
    assert torch.equal(dh_NW[routed:], untouched[routed:])


@mostly_slow("widths", [(144, 272), (256, 512)])
def test_weight_gradients_by_a_pipeline_see_their_expert_s_rows_alone(
    widths, device, hopper_launch
):
    """Rows for no expert, which nobody writes, are NaN. An expert without rows gets zeros."""
    from acmoe.ops.device.settings import PipelineConfig

    plan, routed = plan_of(COUNTS, NOBODY, device), sum(COUNTS)
    p_NO, q_NI = (drawn(plan.num_rows, width, device=device) for width in widths)
    p_NO[routed:] = q_NI[routed:] = torch.nan
    settings = PipelineConfig("cooperative", 3)
    dw_EOI = hopper_launch.launch_weights(p_NO, q_NI, plan, settings)
    for expert, rows in each_expert(plan):
        if COUNTS[expert] == 0:
            assert not dw_EOI[expert].any()
        else:
            assert_near(dw_EOI[expert], p_NO[rows].double().T @ q_NI[rows].double())


@mostly_slow(("transposed", "stages", "widths"), [(False, 4, (256, 512)), (True, 3, (144, 272))])
def test_gathered_weight_gradients_see_their_expert_s_tokens_alone(
    transposed, stages, widths, device, hopper_launch
):
    """Rows for no expert are NaN, and so are the tokens that only they name."""
    from acmoe.ops.device.settings import PipelineConfig

    plan, routed = plan_of(COUNTS, NOBODY, device, top_k=2), sum(COUNTS)
    x_TD = drawn(plan.num_rows // 2, widths[0], device=device)
    r_NR = drawn(plan.num_rows, widths[1], device=device)
    r_NR[routed:] = torch.nan
    token_N = plan.permutation // 2
    unused_T = torch.ones(len(x_TD), dtype=torch.bool, device=device)
    unused_T[token_N[:routed]] = False
    x_TD[unused_T] = torch.nan
    settings = PipelineConfig("cooperative", stages)
    dw = hopper_launch.launch_gathered_weights(x_TD, r_NR, plan, settings, transposed=transposed)
    assert_sums_of_experts(dw, x_TD[token_N], r_NR, plan, transposed=transposed)


@mostly_slow(
    ("copied", "gathers", "dtype", "calls"),
    [
        (True, False, torch.bfloat16, ["launch_weights", "launch_weights"]),
        # The rows that "hidden" reads stay copied.
        pytest.param(
            *(True, True, torch.bfloat16, ["launch_weights", "launch_gathered_weights"]),
            marks=pytest.mark.slow,
        ),
        (False, True, torch.bfloat16, ["launch_gathered_weights", "launch_gathered_weights"]),
        # Gradients of float32, which the Hopper kernel does not give: x is copied after all.
        (True, True, torch.float32, []),
    ],
    keep=(2,),
)
def test_a_layer_by_pipelined_gemms_is_the_layer(
    copied, gathers, dtype, calls, device, hopper_launch, fresh_choice, monkeypatch
):
    from acmoe.ops.device import tuning

    called = []
    for name in ("launch_weights", "launch_gathered_weights"):
        monkeypatch.setattr(hopper_launch, name, noted(called, getattr(hopper_launch, name)))
    table = {
        "pipeline_hidden/256/256/4": ["ping-pong", 2, 2],
        "pipeline_down/256/256/4": ["cooperative", 3, 0, 2],
        "pipeline_input/256/256/4": ["ping-pong", 3],
        "pipeline_down_weight/256/256/4": ["cooperative", 2, 0, 0, gathers],
        "pipeline_up_weight/256/256/4": ["cooperative", 2, 0, 0, gathers],
        "copy/256/256/4": [False, copied],
    }
    monkeypatch.setattr(tuning, "user_table", lambda: table)
    monkeypatch.setattr(fresh_choice, "gluon_unsupported", lambda device: None)
    layer = Layer("swiglu", False, (37, 256, 256, 4, 2), device)
    expected = layer.reference().detach(), *layer.gradients(layer.reference())
    layer.x, layer.gate = (
        leaf.detach().to(torch.bfloat16).requires_grad_() for leaf in (layer.x, layer.gate)
    )
    layer.mlp.to(dtype)
    layer.cotangent = layer.cotangent.to(torch.bfloat16)
    out = layer.fused()
    found = out, *layer.gradients(out)
    for mine, right in zip(found, expected, strict=True):
        assert_near(mine, right.double(), 1.5e-2)  # a chain of three roundings
    assert called == calls
    for weight in found[3:]:
        is_rounded = torch.equal(weight, weight.bfloat16().to(dtype))
        assert weight.dtype == dtype and is_rounded == (dtype == torch.bfloat16)


class TestChoice:
    """The device is an H200 with a known version of triton, unless a test says otherwise."""

    @pytest.fixture(autouse=True)
    def card(self, monkeypatch):
        triton = pytest.importorskip("triton")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(triton, "__version__", "3.6.0")

    @staticmethod
    def obstacle(kernel, sizes, dtype=torch.bfloat16, act="swiglu", **how):
        from acmoe.ops.experts.hopper.choice import pipeline_unsupported
        from acmoe.ops.experts.triton.sizes import Sizes

        size = Sizes(32768, *sizes, 8, act)
        device = torch.device(how.pop("device", "cuda"))
        return pipeline_unsupported(kernel, size, dtype, device, **({"gather": False} | how))

    def test_what_was_measured_faster_runs(self):
        for sizes in ((2048, 1024, 64), (2048, 768, 128)):
            assert [self.obstacle(k, sizes) for k in ("hidden", "down", "input")] == [None] * 3
        for kernel in ("hidden", "down", "input", "down_weight", "up_weight"):  # by the rule
            assert self.obstacle(kernel, (1024, 1024, 32)) is None
            if kernel != "input":
                for sizes in ((2048, 1408, 64), (2880, 2880, 32), (7168, 2048, 32)):
                    assert self.obstacle(kernel, sizes) is None
        for kernel in ("down_weight", "up_weight"):
            assert self.obstacle(kernel, (1536, 256, 128), gather=True) is None

    @pytest.mark.parametrize(
        ("kernel", "sizes", "how", "reason"),
        [
            ("input", (4096, 14336, 8), {}, "not found faster"),
            ("down", (1024, 9216, 32), {}, "not found faster"),
            ("hidden", (2048, 1024, 64), {"dtype": torch.float16}, "bfloat16"),
            ("hidden", (2048, 1024, 64), {"act": "gelu"}, "swiglu"),
            ("up_weight", (2048, 1024, 64), {"result": torch.float32}, "weights are torch.float32"),
            ("down", (2048, 1024, 64), {"bare": False}, "neither bias nor dropout"),
            ("hidden", (1536, 256, 128), {"gather": True}, "tokens are gathered"),
            ("up_weight", (2048, 1024, 64), {"gather": True}, "tokens are gathered"),
            ("hidden", (1024, 336, 32), {}, "multiples of 64 and 64, not 1024, 336"),
            ("down_weight", (1024, 520, 32), {}, "multiples of 16 and 16, not 520, 1024"),
            ("down", (64, 1024, 32), {}, "64 by 128, larger than 1024 by 64"),
            ("hidden", (2048, 1024, 64), {"device": "cpu"}, "CUDA device, not cpu"),
        ],
    )
    def test_what_cannot_or_should_not_says_why(self, kernel, sizes, how, reason):
        assert reason in self.obstacle(kernel, sizes, **how)

    @pytest.mark.parametrize(
        ("kernel", "settings", "reason"),
        [
            ("down", ["cooperative", 5], "5 blocks of 64, more than 256"),
            ("down", ["cooperative", 3, 0, 4], "4 blocks later, in a pipeline of 3"),
            ("hidden", ["cooperative", 3, 2], "no GEMM hidden in the form 'cooperative'"),
            ("up_weight", ["ping-pong", 4], "no GEMM up_weight in the form 'ping-pong'"),
        ],
    )
    def test_a_pipeline_that_would_hang_or_does_not_exist_is_refused(
        self, kernel, settings, reason, monkeypatch
    ):
        from acmoe.ops.device import tuning

        monkeypatch.setattr(tuning, "_table", lambda: {f"pipeline_{kernel}/256/256/4": settings})
        assert reason in self.obstacle(kernel, (256, 256, 4))

    @pytest.mark.parametrize(
        ("sizes", "gathering"),
        [
            ((1536, 256, 128), ["up", "hidden", "down_weight", "up_weight"]),
            ((2048, 768, 128), ["up", "up_weight"]),
            ((2048, 1024, 64), ["up"]),
            ((4096, 14336, 8), []),
        ],
    )
    def test_each_copy_of_tokens_is_made_where_it_was_measured_to_pay(self, sizes, gathering):
        assert self.gathering(sizes) == gathering

    def test_what_no_pipeline_can_gather_is_copied(self, monkeypatch):
        """The first weight's gradient takes twice as long where Triton gathers."""
        import triton

        assert self.gathering((2048, 768, 128), torch.float16) == ["up"]
        monkeypatch.setattr(triton, "__version__", "3.7.1")
        assert self.gathering((2048, 768, 128)) == ["up"]

    @staticmethod
    def gathering(sizes, dtype=torch.bfloat16):
        from acmoe.ops.experts.hopper.choice import gathers
        from acmoe.ops.experts.triton.sizes import Sizes

        where = Sizes(32768, *sizes, 8, "swiglu"), dtype, torch.device("cuda")
        return [k for k in ("up", "hidden", "down_weight", "up_weight") if gathers(k, *where)]

    def test_tokens_are_the_narrow_side_of_a_tile(self, monkeypatch):
        """up_weight of rows: 128 of 2F by 256 features; of tokens: 128 features by 256 of 2F."""
        from acmoe.ops.device import tuning

        settings = {"pipeline_up_weight/192/256/4": ["cooperative", 4, 0, 0, True]}
        monkeypatch.setattr(tuning, "_table", lambda: settings)
        assert self.obstacle("up_weight", (192, 256, 4), gather=True) is None
        assert "larger than 192 by 512" in self.obstacle("up_weight", (192, 256, 4))

    def test_other_cards_and_other_versions_do_not(self, monkeypatch):
        import triton

        monkeypatch.setattr(triton, "__version__", "3.7.1")
        assert "not yet with 3.7.1" in self.obstacle("hidden", (2048, 1024, 64))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
        assert "capability 9" in self.obstacle("hidden", (2048, 1024, 64))

    def test_what_was_chosen_is_said_once(self, fresh_choice, caplog):
        from acmoe.ops.experts.triton.sizes import Sizes

        caplog.set_level("INFO", logger="acmoe")
        x_TD = torch.empty(1, 2048, dtype=torch.float16)
        for tokens in (4096, 8192, 16384):
            size = Sizes(tokens, 2048, 1024, 64, 8, "swiglu")
            assert fresh_choice._settings_for("down", size, x_TD, gather=False, bare=True) is None
        assert [record.message for record in caplog.records] == [
            "the experts' GEMM down runs on triton; gluon: it takes bfloat16, not torch.float16"
        ]

    def test_a_pipeline_of_the_table_never_waits_forever(self):
        """A group waits for blocks that the other must have: the table's shapes have them."""
        from acmoe.ops.device import tuning

        for name, row in tuning._table().items():
            kernel, *sizes = name.split("/")
            if kernel.startswith("pipeline_") and row is not None:
                product = kernel.removeprefix("pipeline_")
                sizes = tuple(map(int, sizes))
                gather = product in self.gathering(sizes)
                assert self.obstacle(product, sizes, gather=gather) is None, name


def on_known_card():
    from acmoe.ops.device.hopper import gluon_unsupported

    return gluon_unsupported(torch.device("cuda")) is None


@pytest.mark.gpu
def test_on_a_card_both_ways_to_the_hidden_gradient_agree(fresh_choice, monkeypatch):
    from acmoe.ops.experts.triton.sizes import RowOperand, Sizes, Sums

    if not on_known_card():
        pytest.skip("the Hopper kernels are for another card or another triton")
    plan = plan_of((1000, 0, 64, 3001), 70, "cuda")
    size = Sizes(plan.num_rows, 512, 384, 4, 1, "swiglu")
    x_ND = drawn(plan.num_rows, size.dim, device="cuda")
    down_EDF = drawn(4, size.dim, size.hidden, device="cuda") / size.dim**0.5
    h_NW = drawn(plan.num_rows, size.width, device="cuda")
    gate_N1 = torch.rand(plan.num_rows, 1, device="cuda")

    def results():
        dh_NW = h_NW.clone()
        a_NF, shares = fresh_choice.run_hidden(
            *(RowOperand(x_ND, False), down_EDF, dh_NW, dh_NW, gate_N1, x_ND, plan, size),
            *(Sums(0, 0), 0.0, plan.offsets),
        )
        return [dh_NW[:4065], a_NF[:4065], shares.gate.sum(0)[:4065]]

    first, second = results(), results()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    monkeypatch.setattr(fresh_choice, "gluon_unsupported", lambda device: "not today")
    fresh_choice._usable_settings.cache_clear()
    apart = results()
    for one, other in zip(first, apart, strict=True):
        assert_near(one, other.double(), 8e-3)  # apart, the gradient by a is rounded on its way


@mostly_slow("hidden", [208, 256])
def test_the_up_projection_by_a_pipeline_is_its_product(hidden, device, hopper_launch):
    """Hidden units that are no multiple of a tile: the last tile overlaps its neighbour."""
    plan = plan_of(COUNTS, NOBODY, device, top_k=2)
    tokens = drawn(plan.num_rows // 2, 192, device=device)
    up = drawn(len(COUNTS), 2 * hidden, 192, device=device) / 14
    a_NF = hopper_launch.launch_up(tokens, up, plan, hidden)
    for expert, rows in each_expert(plan):
        h = tokens[plan.token[rows].long()].double() @ up[expert].double().T
        gate, other = h.bfloat16().double().split(hidden, dim=1)
        right = torch.nn.functional.silu(gate) * other
        if len(right):
            assert_near(a_NF[rows], right)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keep": True}, "stores no h"),
        ({"dropout": 0.1}, "nor dropout"),
        ({"act": "gelu"}, "the activation swiglu"),
        ({"gather": False}, "no copied rows"),
        ({"dim": 96}, "not 96, 256"),
        ({"hidden": 64}, "not 128, 64"),
        ({"tokens": 128}, "Triton's is expected to be faster"),  # 64 rows an expert
        ({"tokens": 1026}, "Triton's is expected to be faster"),  # 513 rows an expert
        ({}, "a CUDA device, not cpu"),
    ],
)
def test_the_up_projection_says_why_triton_runs(change, reason):
    from acmoe.ops.experts.hopper.up_choice import up_unsupported
    from acmoe.ops.experts.triton.sizes import RowOperand, Sizes

    case = {"tokens": 256, "dim": 128, "hidden": 256, "act": "swiglu"}
    case |= {"gather": True, "dropout": 0.0, "keep": False} | change
    size = Sizes(case["tokens"], case["dim"], case["hidden"], 4, 2, case["act"])
    rows = RowOperand(torch.zeros(1, 1, dtype=torch.bfloat16), case["gather"])
    assert reason in up_unsupported(rows, None, size, case["dropout"], case["keep"])
