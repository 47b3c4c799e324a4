"""Tuning at first use: what is timed and chosen, when nothing is, and what is remembered.

On a CPU the kernels are interpreted and the times invented; a GPU is not needed for what is chosen.
"""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from acmoe.errors import UserError
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts import ExpertWeights
from acmoe.ops.experts.settings import lookup
from acmoe.ops.experts.settings.gemms import PipelineConfig
from acmoe.ops.experts.settings.rules import Layer
from acmoe.ops.sort import sort_rows
from slow_cases import mostly_slow

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="times are invented, and devices said to be others"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing measured, an empty folder, and a GPU's name."""
    from acmoe.ops.experts.tune import first_use

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.delenv("ACMOE_TUNE", raising=False)
    first_use.forget()
    yield first_use
    first_use.forget()


def inputs(tokens=40, dim=48, hidden=40, experts=3, top_k=2):
    """Experts of 16-bit numbers, and tokens of which two have no expert."""
    from acmoe.ops.experts.tune.inputs import Inputs

    torch.manual_seed(0)
    gate, ids = torch.rand(tokens, experts).topk(top_k)
    ids[:2] = experts
    drawn = [
        torch.randn(*shape) / 6 for shape in ((experts, 2 * hidden, dim), (experts, dim, hidden))
    ]
    x = torch.randn(tokens, dim)
    halves = [one.bfloat16() for one in (x, *drawn)]
    return Inputs(
        *halves, None, None, gate.bfloat16(), sort_rows(ids, experts), "swiglu", torch.bfloat16
    )


def timed_by(monkeypatch, milliseconds):
    """Invent the time of a call from the settings that it would run with."""
    from acmoe.ops.experts.tune import search

    def time_of(call, device):
        return milliseconds(dict(lookup.OVERRIDE), list(lookup.COPY_OVERRIDE))

    monkeypatch.setattr(search, "_time", time_of)
    return search


def quick_are(monkeypatch, search, *candidates):
    monkeypatch.setattr(search, "quick", lambda kernel, layer, tma: list(candidates))


def test_the_fastest_settings_become_rows_of_a_table(monkeypatch):
    best, worse = Blocks(32, 32, 32, 4, 2, True), Blocks(16, 32, 32, 4, 2)

    def milliseconds(blocks, copied):
        return 1.0 + (best not in blocks.values()) + 0.5 * (not copied[0])

    search = timed_by(monkeypatch, milliseconds)
    quick_are(monkeypatch, search, worse, best)
    rows = search.tune_forward(inputs(tokens=12, dim=32, hidden=32))
    assert rows == {
        "copy": [True, False],
        "up": list(best),
        "down": list(best),
        "pipeline_down": None,
    }
    assert lookup.OVERRIDE == {} and lookup.PIPELINE_OVERRIDE == {} and lookup.COPY_OVERRIDE == []


@pytest.mark.slow
def test_the_backward_copies_where_all_its_gemms_together_gain(monkeypatch):
    """W = 256: both ways are tried. Of each GEMM a copy saves or costs something."""
    best = Blocks(32, 64, 32, 4, 2, True, 1)
    saved = {"hidden": 0.5, "down_weight": 0.4, "up_weight": -0.3}

    def milliseconds(blocks, copied):
        (kernel,) = blocks
        return 2.0 - (blocks[kernel] == best) - copied[1] * saved.get(kernel, 0.0)

    search = timed_by(monkeypatch, milliseconds)
    quick_are(monkeypatch, search, best)
    rows = search.tune_backward(inputs(hidden=128, tokens=8))
    assert rows["copy"] == [False, True]
    assert all(rows[name] == list(best) for name in ("hidden", "down_weight", "up_weight", "input"))


def test_a_candidate_that_is_wrong_or_fails_is_left_out(monkeypatch):
    from acmoe.ops.experts.tune import search

    own, wrong, failing = (Blocks(16, n, 32, 4, 2) for n in (16, 32, 64))

    def call():
        held = lookup.OVERRIDE.get("up", own)
        if held == failing:
            raise RuntimeError("out of resource")
        return (torch.full((80, 4), 1.5 if held == wrong else 1.0),)

    monkeypatch.setattr(search, "_time", lambda call, device: 1.0 if call() else 0.0)
    monkeypatch.setattr(lookup, "blocks_for", lambda kernel, layer: own)
    quick_are(monkeypatch, search, wrong, failing)
    assert search.fastest("up", call, inputs(), copied=False).settings == own


def test_pipelines_come_first_and_leave_one_triton_gemm_beside_them():
    """The cost model: at 2,048 rows of 1,408 features and more a pipeline is expected to win."""
    from acmoe.ops.experts.tune.candidates import cost, quick

    wide = Layer(2048, 1408, 64, 2816, rows=2048)
    assert isinstance(quick("down", wide, tma=True)[0], PipelineConfig)
    assert all(isinstance(one, Blocks) and one.n < 256 for one in quick("up", wide, tma=True))
    assert not any(one.tma for one in quick("up", wide, tma=False))
    tall, flat = Blocks(128, 128, 64, 4, 3, True, 0, 2), Blocks(64, 128, 64, 4, 4, True, 0, 2)
    assert cost("up", tall, wide) < cost("up", flat, wide)  # flat tiles load more from L2
    # With 64 rows an expert the time is that of memory: weights, rows and results at 4.2 TB/s.
    numbers = 64 * (2048 * 2816 + 64 * (2048 + 2816))
    few = wide._replace(rows=64)
    assert cost("up", flat, few) == pytest.approx(2 * numbers / 4.2e12)


@pytest.mark.parametrize(
    ("kernel", "form", "sizes", "tried"),
    [
        ("down", "columns", (2048, 128), True),
        ("down", "columns", (2048, 256), False),
        ("hidden", "cooperative", (4096, 256), True),
        ("hidden", "cooperative", (2880, 256), False),
    ],
)
def test_forms_that_pay_at_few_sizes_are_timed_there_alone(kernel, form, sizes, tried):
    """Every candidate takes seconds to compile."""
    from acmoe.ops.experts.tune.candidates import quick

    dim, rows = sizes
    layer = Layer(dim, 1024, 8, 2048, rows)
    found = quick(kernel, layer, tma=True)
    forms = [one.form for one in found if isinstance(one, PipelineConfig)]
    assert (form in forms) == tried


BIG = (16384, 2048, 1408, 64, 6, "swiglu")  # 2 * 98304 * 2048 * 4224 = 1.7e12 operations


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        (BIG, torch.bfloat16, None),
        (BIG, torch.float32, "float32"),
        ((16, *BIG[1:]), torch.bfloat16, "few rows"),
        ((16384, 64, 64, 8, 2, "relu"), torch.bfloat16, "small"),
        ((32768, 2048, 1024, 64, 8, "swiglu"), torch.bfloat16, "a table names it"),
    ],
)
def test_what_is_tuned(sizes, dtype, reason, fresh):
    from acmoe.ops.experts.triton.sizes import Sizes

    size = Sizes(*sizes)
    found = fresh.unsuitable(size, size.layer(dtype))
    assert found == reason if reason is None else reason in found


def test_what_the_user_says_comes_first(fresh, monkeypatch):
    from acmoe.ops.experts.triton.sizes import Sizes

    size = Sizes(*BIG)
    monkeypatch.setenv("ACMOE_TUNE", "never")
    assert "ACMOE_TUNE=never" in fresh.unsuitable(size, size.layer(torch.bfloat16))
    monkeypatch.delenv("ACMOE_TUNE")
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in fresh.unsuitable(size, size.layer(torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(False)


ROWS = {"copy": [False, True], "up": [16, 32, 32, 4, 2], "pipeline_input": ["ping-pong", 6]}


class TestSettling:
    """The first use of a layer, with a search that only counts how often it is asked."""

    @pytest.fixture
    def asked(self, fresh, monkeypatch):
        calls = []

        def measure(parts, *rest):
            calls.append(parts)
            return dict(ROWS)

        monkeypatch.setattr(fresh, "_measure", measure)
        monkeypatch.setattr(fresh, "FEWEST_FLOPS", 0)
        return calls

    def use(self, first_use, *, tokens=512, backward=True):
        given = inputs(tokens=tokens)
        size = given.sizes
        weights = ExpertWeights(given.up, given.down, None, None)
        layer = size.layer(torch.bfloat16)
        where = (given.x, weights, given.rows, given.gate, backward)
        first_use._settle(size, layer, *where)
        return layer

    def test_a_layer_is_measured_once_and_then_read(self, fresh, asked):
        layer = self.use(fresh)
        assert asked == [["forward", "backward"]]
        assert lookup.blocks_for("up", layer) == Blocks(16, 32, 32, 4, 2)
        assert lookup.pipeline_for("input", layer) == PipelineConfig("ping-pong", 6)
        assert lookup.copies_rows(layer, backward=True) and not lookup.copies_rows(layer)
        fresh.forget()  # another process
        assert lookup.blocks_for("up", layer) != Blocks(16, 32, 32, 4, 2)
        self.use(fresh)
        assert len(asked) == 1
        assert lookup.blocks_for("up", layer) == Blocks(16, 32, 32, 4, 2)

    def test_more_rows_are_another_layer(self, fresh, asked):
        """300 tokens of two choices are 200 rows for each of 3 experts, 512 are 342."""
        assert self.use(fresh, tokens=300) != self.use(fresh, tokens=512)
        assert len(asked) == 2

    @mostly_slow("text", ["", '{"of": 1, "rows": {}}', "[]", "{}"], keep={1}, gpu={0})
    def test_a_damaged_file_is_measured_again(self, text, fresh, asked, tmp_path):
        layer = self.use(fresh)
        (path,) = tmp_path.rglob("*.json")
        path.write_text(text)
        fresh.forget()
        assert self.use(fresh) == layer and len(asked) == 2
        assert json.loads(path.read_text())["rows"] == ROWS

    def test_settings_that_no_kernel_has_are_measured_again(self, fresh, asked, tmp_path, caplog):
        self.use(fresh)
        (path,) = tmp_path.rglob("*.json")
        found = json.loads(path.read_text())
        found["rows"]["up"] = [16, 48, 32, 4, 2]
        path.write_text(json.dumps(found))
        fresh.forget()
        self.use(fresh)
        assert len(asked) == 2 and "no kernel has" in caplog.text

    def test_a_folder_that_cannot_be_written_is_said(self, fresh, asked, tmp_path, caplog):
        (tmp_path / "acmoe").write_text("a file where the folder should be")
        layer = self.use(fresh)
        assert "not kept for the next process" in caplog.text
        assert lookup.blocks_for("up", layer) == Blocks(16, 32, 32, 4, 2)

    def test_ranks_of_a_distributed_run_measure_nothing_but_read(self, fresh, asked, monkeypatch):
        monkeypatch.setattr(fresh, "_distributed", lambda: True)
        layer = self.use(fresh)
        assert asked == [] and layer not in lookup.MEASURED
        monkeypatch.setattr(fresh, "_distributed", lambda: False)
        self.use(fresh)
        fresh.forget()
        monkeypatch.setattr(fresh, "_distributed", lambda: True)
        self.use(fresh)
        assert len(asked) == 1 and layer in lookup.MEASURED

    def test_what_was_measured_can_be_used_without_measuring_more(self, fresh, asked, monkeypatch):
        monkeypatch.setenv("ACMOE_TUNE", "cached")
        layer = self.use(fresh)
        assert asked == [] and layer not in lookup.MEASURED

    def test_a_cpu_is_never_tuned(self, fresh, asked):
        given = inputs()
        weights = ExpertWeights(given.up, given.down, None, None)
        fresh.prepare(given.x, weights, given.rows, given.gate, "swiglu")
        assert asked == []


def pretended_gpu(fresh, monkeypatch):
    """Return a function that prepares a call of a layer on a GPU that does not exist."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def prepare(tokens, act="relu", needs=False):
        x = SimpleNamespace(
            device=torch.device("cuda"),
            shape=(tokens, 8),
            dtype=torch.bfloat16,
            requires_grad=needs,
        )
        up, down = torch.zeros(4, 16, 8), torch.zeros(4, 8, 16)
        weights = ExpertWeights(up, down, None, None)
        fresh.prepare(x, weights, None, torch.zeros(tokens, 2), act)

    return prepare


def test_a_wrong_option_or_ctrl_c_leaves_a_layer_to_the_next_call(fresh, monkeypatch):
    prepare = pretended_gpu(fresh, monkeypatch)
    monkeypatch.setenv("ACMOE_TUNE", "always")
    for _ in range(2):
        with pytest.raises(UserError, match="ACMOE_TUNE='always' is unknown"):
            prepare(8)
    calls = []

    def stopped(*rest):
        calls.append(rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(fresh, "_settle", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(8)
    assert len(calls) == 2


def test_a_layer_is_settled_once_for_each_kind_of_call(fresh, monkeypatch):
    """A GPU is pretended; calls of one shape are then not looked at again."""
    settled = []
    prepare = pretended_gpu(fresh, monkeypatch)
    monkeypatch.setattr(fresh, "_settle", lambda size, layer, *rest: settled.append(rest[-1]))

    for tokens in (8, 8, 7):  # 4 rows for an average expert, also of 7 tokens
        prepare(tokens)
    assert settled == [False]
    prepare(8, needs=True)
    prepare(8, act="gelu")
    prepare(64)
    assert settled == [False, True, False, False]
    fresh.forget()
    prepare(8)
    assert len(settled) == 5


def test_without_a_home_folder_nothing_is_remembered(fresh, monkeypatch, caplog):
    from acmoe.ops.experts.tune import cache

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and no such user
    layer = Layer(64, 4, 64, 64, 64, torch.bfloat16)
    what = cache.identity(layer, "relu", False, torch.bfloat16, torch.device("cpu"))
    assert cache.read(what) == {} and not caplog.records
    cache.write(what, {"copy": [True, False]})
    assert "what was tuned is not kept for the next process" in caplog.text
