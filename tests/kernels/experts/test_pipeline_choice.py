"""Which expert GEMMs run by a Hopper pipeline, which tokens are gathered, and why others are not.

D features, F hidden units, E experts.
"""

import pytest
import torch


class TestChoice:
    """The device is an H200 with a known version of triton, unless a test says otherwise."""

    @pytest.fixture(autouse=True)
    def card(self, monkeypatch):
        triton = pytest.importorskip("triton")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(triton, "__version__", "3.6.0")

    @staticmethod
    def unsupported(kernel, sizes, dtype=torch.bfloat16, act="swiglu", **how):
        from acmoe.ops.experts.hopper.choice import pipeline_unsupported
        from acmoe.ops.experts.triton.sizes import Sizes

        size = Sizes(32768, *sizes, 8, act)
        device = torch.device(how.pop("device", "cuda"))
        return pipeline_unsupported(kernel, size, dtype, device, **({"gather": False} | how))

    def test_what_was_measured_faster_runs(self):
        for sizes in ((2048, 1024, 64), (2048, 768, 128)):
            assert [self.unsupported(k, sizes) for k in ("hidden", "down", "input")] == [None] * 3
        for kernel in ("hidden", "down", "input", "down_weight", "up_weight"):  # by the rule
            assert self.unsupported(kernel, (1024, 1024, 32)) is None
            if kernel != "input":
                for sizes in ((2048, 1408, 64), (2880, 2880, 32), (7168, 2048, 32)):
                    assert self.unsupported(kernel, sizes) is None
        for kernel in ("down_weight", "up_weight"):
            assert self.unsupported(kernel, (1536, 256, 128), gather=True) is None

    @pytest.mark.parametrize(
        ("kernel", "sizes", "how", "reason"),
        [
            ("input", (4096, 14336, 8), {}, "not found faster"),
            ("down", (1024, 9216, 512), {}, "not found faster"),
            ("hidden", (2048, 1024, 64), {"dtype": torch.float16}, "bfloat16"),
            ("hidden", (2048, 1024, 64), {"act": "gelu"}, "swiglu"),
            ("up_weight", (2048, 1024, 64), {"result": torch.float64}, "weights are torch.float64"),
            (
                *("up_weight", (2048, 1024, 64), {"gather": True, "result": torch.float32}),
                "bfloat16 where it gathers tokens, and the weights are torch.float32",
            ),
            ("down", (2048, 1024, 64), {"bare": False}, "neither bias nor dropout"),
            ("hidden", (1536, 256, 128), {"gather": True}, "tokens are gathered"),
            ("up_weight", (4096, 14336, 8), {"gather": True}, "tokens are gathered"),
            ("hidden", (1024, 336, 32), {}, "multiples of 64 and 64, not 1024, 336"),
            ("down_weight", (1024, 520, 32), {}, "multiples of 16 and 16, not 520, 1024"),
            ("down", (64, 1024, 32), {}, "64 by 128, larger than 1024 by 64"),
            ("hidden", (2048, 1024, 64), {"device": "cpu"}, "CUDA device, not cpu"),
        ],
    )
    def test_what_cannot_or_should_not_says_why(self, kernel, sizes, how, reason):
        assert reason in self.unsupported(kernel, sizes, **how)

    def test_weights_in_float32_have_their_gradients_by_a_pipeline(self):
        for kernel in ("down_weight", "up_weight"):
            assert self.unsupported(kernel, (2048, 1024, 64), result=torch.float32) is None

    @pytest.mark.parametrize(("kernel", "form"), [("up_weight", "ping-pong"), ("input", "columns")])
    def test_a_pipeline_that_does_not_exist_is_refused(self, kernel, form, monkeypatch):
        from acmoe.ops.experts.settings import tables

        table = {f"pipeline_{kernel}/256/256/4": [form, 4]}
        monkeypatch.setattr(tables, "package_table", lambda: table)
        reason = self.unsupported(kernel, (256, 256, 4))
        assert reason == f"there is no GEMM {kernel} in the form {form!r}"

    @pytest.mark.parametrize(
        ("sizes", "gathering"),
        [
            ((1536, 256, 128), ["up", "hidden", "down_weight", "up_weight"]),
            ((2048, 768, 128), ["up", "up_weight"]),
            ((2048, 1024, 64), ["up", "up_weight"]),
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
        from acmoe.ops.experts.settings import tables

        settings = {"pipeline_up_weight/192/256/4": ["cooperative", 4, 0, True]}
        monkeypatch.setattr(tables, "package_table", lambda: settings)
        assert self.unsupported("up_weight", (192, 256, 4), gather=True) is None
        assert "larger than 192 by 512" in self.unsupported("up_weight", (192, 256, 4))

    def test_other_cards_and_other_versions_do_not(self, monkeypatch):
        import triton

        monkeypatch.setattr(triton, "__version__", "3.7.1")
        assert "not yet with 3.7.1" in self.unsupported("hidden", (2048, 1024, 64))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
        assert "capability 9" in self.unsupported("hidden", (2048, 1024, 64))

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
        from acmoe.ops.experts.settings import tables

        rows = tables.package_table().items()
        names = [name for name, row in rows if name.startswith("pipeline_") and row is not None]
        assert names
        for name in names:
            kernel, *numbers = name.split("/")
            product, sizes = kernel.removeprefix("pipeline_"), tuple(map(int, numbers))
            gather = product in self.gathering(sizes)
            assert self.unsupported(product, sizes, gather=gather) is None, name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keep": True}, "store no h"),
        ({"dropout": 0.1}, "nor dropout"),
        ({"act": "gelu"}, "the activation swiglu"),
        ({"dtype": torch.float16}, "they take bfloat16, not torch.float16"),
        ({"dim": 96}, "not 96, 256"),
        ({"hidden": 64}, "not 128, 64"),
        ({"tokens": 128}, "Triton's is expected to be faster"),  # 64 rows an expert
        ({"tokens": 1026}, "Triton's is expected to be faster"),  # 513 rows an expert
        ({}, "a CUDA device, not cpu"),
    ],
)
def test_the_up_projection_says_why_triton_runs(change, reason):
    from acmoe.ops.experts.hopper.up_choice import up_unsupported
    from acmoe.ops.experts.triton.sizes import Sizes

    case = {"tokens": 256, "dim": 128, "hidden": 256, "act": "swiglu"}
    case |= {"dtype": torch.bfloat16, "dropout": 0.0, "keep": False} | change
    size = Sizes(case["tokens"], case["dim"], case["hidden"], 4, 2, case["act"])
    x = torch.zeros(1, 1, dtype=case["dtype"])
    assert reason in up_unsupported(x, None, size, case["dropout"], case["keep"])
