"""The tuner: what it tries, what it drops, what it writes, and what kernels read of that."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.lab.bench.shapes import SHAPES
from acmoe.lab.bench.tune import search as tune
from acmoe.lab.bench.tune.candidates import KERNELS, blocks, compile_jobs, trying
from acmoe.lab.bench.tune.search import TuneConfig, bench_tune, rank, reading, write_winners
from acmoe.ops import device_support
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings import lookup, tables
from acmoe.ops.experts.settings.gemms import PipelineConfig
from acmoe.ops.experts.settings.rules import Layer

CPU = torch.device("cpu")


def sized(dim: int, hidden: int, experts: int) -> Layer:
    """Return a layer of gated experts with many rows."""
    return Layer(dim, hidden, experts, 2 * hidden, rows=1024)


def test_candidates_are_compiled_once_for_all_shapes_that_share_them() -> None:
    # olmoe and qwen30b: swiglu, every block of features divides 2048, 1024, 768 and their doubles,
    # and no tile is wider than 768; so the second shape adds nothing.
    one = compile_jobs([SHAPES["olmoe"]], ("down",), CPU)
    both = compile_jobs([SHAPES["olmoe"], SHAPES["qwen30b"]], ("down",), CPU)
    assert both == one and len(one) == len(blocks("down", SHAPES["olmoe"]))
    # gelu is another kernel
    assert len(compile_jobs([SHAPES["olmoe"], SHAPES["swin"]], ("down",), CPU)) == 2 * len(one)
    # Parts of a weight gradient are other kernels than the whole, but two parts than four are not.
    weights = compile_jobs([SHAPES["switch"]], ("up_weight",), CPU)
    tiles = {one._replace(splits=0) for one in blocks("up_weight", SHAPES["switch"])}
    assert len(weights) == 2 * len(tiles)


def test_only_small_weights_are_summed_in_parts() -> None:
    # mixtral: 8 * 4096 * 28672 / (128 * 256) = 28,672 tiles; switch, of 128 by 128: 121.
    assert {one.splits for one in blocks("up_weight", SHAPES["mixtral"])} == {1}
    square = [b for b in blocks("up_weight", SHAPES["switch"]) if b[:5] == (128, 128, 64, 8, 3)]
    assert {one.splits for one in square} == {1, 2, 3, 4, 6}
    assert {one.splits for one in blocks("down", SHAPES["switch"])} == {0}


def test_two_accumulators_leave_no_room_for_the_widest_tile() -> None:
    gated = blocks("up", SHAPES["olmoe"])
    assert all(one.n < 256 for one in gated)
    assert len(gated) < len(blocks("up", SHAPES["switch"]))
    assert {one.tma for one in gated} == {False, True}


def test_programs_that_stay_read_by_the_copy_engine_and_share_a_multiprocessor() -> None:
    """At most 255 registers for each of 256 threads, of the 65,536 there are."""
    stay = [one for one in blocks("down", SHAPES["olmoe"]) if one.persistent]
    assert {one.num_warps * one.persistent for one in stay} == {8}
    assert all(one.tma for one in stay)


def test_winners_join_the_table_that_is_there(tmp_path: Path) -> None:
    table = tmp_path / "tuned.json"
    write_winners({"up/8/8/2": Blocks(1, 2, 4, 4, 5), "down/8/8/2": Blocks(1, 1, 1, 1, 1)}, table)
    write_winners({"up/8/8/2": Blocks(16, 16, 16, 4, 2, True)}, table)
    assert json.loads(table.read_text()) == {
        "down/8/8/2": [1, 1, 1, 1, 1, False, 0, 0],
        "up/8/8/2": [16, 16, 16, 4, 2, True, 0, 0],
    }


def test_tuning_needs_a_gpu_and_known_kernels() -> None:
    with pytest.raises(UserError, match="device=cpu"):
        bench_tune(TuneConfig(device="cpu"))
    with pytest.raises(UserError, match=f"kernel 'side' is unknown; choose among {KERNELS[0]}"):
        TuneConfig(kernels=("side",))


def kernel_of(results: dict[int, float]) -> Callable[[], tuple[Tensor]]:
    """A kernel whose result depends on its block height; a height it does not know fails."""

    def call() -> tuple[Tensor]:
        held = lookup.OVERRIDE.get("up")
        return (torch.full((4,), 1.0 if held is None else results[held.m]),)

    return call


def test_the_tuner_drops_candidates_that_fail_or_compute_something_else() -> None:
    heights = {16: 1.0, 32: 1.0 + 1e-5, 64: 1.5, 128: float("nan")}
    tried = [Blocks(m, 16, 16, 4, 2) for m in (*heights, 256)]
    found = rank("up", kernel_of(heights), tried, CPU, 2)
    assert sorted(one.candidate.m for one in found if isinstance(one.candidate, Blocks)) == [16, 32]
    assert found[0].ms <= found[1].ms
    assert lookup.OVERRIDE == {}


def test_a_kernel_no_candidate_can_run_is_named() -> None:
    with pytest.raises(UserError, match="no candidate of kernel 'up' runs"):
        rank("up", kernel_of({}), [Blocks(16, 16, 16, 4, 2)], CPU, 2)


@pytest.mark.parametrize("size", [64, 4096, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_last_candidate_left_in_memory_is_not_a_result(
    size: int, dtype: torch.dtype
) -> None:
    """A kernel that writes nothing would be the fastest, and right where its memory was freed by
    one that is."""

    def call() -> tuple[Tensor]:
        held = lookup.OVERRIDE.get("up")
        y = torch.empty(4, size, dtype=dtype)
        return (y if held is not None and held.m == 32 else y.fill_(1.5),)

    tried = [Blocks(m, 16, 16, 4, 2) for m in (16, 32)]
    assert [one.candidate for one in rank("up", call, tried, CPU, 2)] == tried[:1]
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_wrong_row_of_thousands_is_seen() -> None:
    def call() -> tuple[Tensor]:
        held = lookup.OVERRIDE.get("up")
        y = torch.ones(5000, 4)
        if held is not None and held.m == 32:
            y[4321] = 0
        return (y,)

    tried = [Blocks(m, 16, 16, 4, 2) for m in (16, 32)]
    assert [one.candidate for one in rank("up", call, tried, CPU, 2)] == tried[:1]


def test_pipelines_are_compared_with_the_gemm_without_one() -> None:
    """Not with the pipeline of the table, which may be the one that is wrong."""

    def call() -> tuple[Tensor]:
        pipeline = lookup.pipeline_for("hidden", sized(512, 512, 8))
        return (torch.full((4,), 1.0 if pipeline is None else 1.5),)

    tried = [None, PipelineConfig("ping-pong", 5, 2), PipelineConfig("ping-pong", 4, 4)]
    assert lookup.pipeline_for("hidden", sized(512, 512, 8)) is not None
    assert [one.candidate for one in rank("pipeline_hidden", call, tried, CPU, 2)] == [None]


def test_a_candidate_is_tried_on_top_of_what_was_found_before() -> None:
    """Pipelines are measured against GEMMs with the best blocks, not by those of the old table."""
    best, settings = Blocks(16, 16, 16, 4, 2), PipelineConfig("ping-pong", 4)
    with trying("down", best), trying("pipeline_down", settings):
        assert lookup.blocks_for("down", sized(8, 8, 2)) == best
        assert lookup.pipeline_for("down", sized(8, 8, 2)) == settings
        with trying("pipeline_down", None):
            assert lookup.pipeline_for("down", sized(8, 8, 2)) is None
        assert lookup.pipeline_for("down", sized(8, 8, 2)) == settings
    assert lookup.OVERRIDE == {} and lookup.PIPELINE_OVERRIDE == {}


class TestOwnTable:
    """The file that ACMOE_TUNED names."""

    @pytest.fixture
    def own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        path = tmp_path / "own.json"
        monkeypatch.setenv("ACMOE_TUNED", str(path))
        tables.clear_cache()
        yield path
        tables.clear_cache()

    def test_its_rows_come_before_the_package_s(self, own: Path) -> None:
        mine = Blocks(16, 32, 32, 4, 2)
        write_winners(
            {
                "up/2048/1024/64": mine,
                "pipeline_down/2048/1024/64": None,
                "pipeline_hidden/512/512/8": None,
                "pipeline_input/512/512/8": PipelineConfig("ping-pong", 5),
            },
            own,
        )
        shape = (2048, 1024, 64)
        assert lookup.blocks_for("up", sized(*shape)) == mine
        assert lookup.blocks_for("down", sized(*shape)).m == 128  # the package's
        assert lookup.pipeline_for("down", sized(*shape)) is None
        assert lookup.pipeline_for("input", sized(*shape)) == PipelineConfig(
            "cooperative", 4
        )  # the package's
        assert lookup.pipeline_for("hidden", sized(512, 512, 8)) is None  # the rule has one
        assert lookup.pipeline_for("input", sized(512, 512, 8)) == PipelineConfig("ping-pong", 5)

    def test_it_is_for_any_card_and_the_package_s_for_hopper_and_blackwell(
        self, own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = Blocks(64, 64, 32, 4, 3)
        write_winners({"up/2048/1024/64": mine}, own)
        monkeypatch.setattr(device_support, "has_large_shared_memory", lambda: False)
        assert lookup.blocks_for("up", sized(2048, 1024, 64)) == mine
        rule = Blocks(128, 128, 64, 8, 3)
        assert lookup.blocks_for("down", sized(2048, 1024, 64)) == rule

    def test_the_tuner_looks_into_the_one_it_writes(self, own: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.json"
        write_winners({"pipeline_input/8/8/2": PipelineConfig("ping-pong", 4)}, own)
        write_winners({"pipeline_input/8/8/2": PipelineConfig("ping-pong", 5)}, other)
        with reading(other):
            assert lookup.pipeline_for("input", sized(8, 8, 2)) == PipelineConfig("ping-pong", 5)
        assert lookup.pipeline_for("input", sized(8, 8, 2)) == PipelineConfig("ping-pong", 4)

    def test_one_that_does_not_exist_is_named(self, own: Path) -> None:
        with pytest.raises(UserError, match=r"ACMOE_TUNED=.*own.json does not exist; .*--table"):
            lookup.pipeline_for("down", sized(8, 8, 2))

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("{", "cannot be read as a table"),
            ("[1]", "holds no table of block sizes"),
            ('{"up/8/8": [1, 2, 3, 4, 5]}', "'up/8/8' cannot be"),
            ('{"up/8/8/2": [1, 2, 3, 4]}', r"'up/8/8/2' cannot be \[1, 2, 3, 4\]; tune it again"),
            ('{"up/8/8/2": null}', "'up/8/8/2' cannot be null"),
            ('{"pipeline_down/8/8/2": ["ping-pong"]}', "cannot be"),
            ('{"copy/8/8/2": [true]}', "cannot be"),
            ('{"copy/8/8/2": [1, 0]}', "cannot be"),
            ('{"up/8/8/2": [16, 16, 16, 4, "2"]}', "cannot be"),
            ('{"up/8/8/2": [16, 16, 48, 4, 2]}', "cannot be"),
            ('{"up/8/8/2": [16, 16, 16, 4, 0]}', "cannot be"),
            ('{"up/8/8/2": [16, 16, 16, 4, 2, 1]}', "cannot be"),
            ('{"sideways/8/8/2": [16, 16, 16, 4, 2]}', "cannot be"),
            ('{"pipeline_up/8/8/2": ["ping-pong", 4]}', "cannot be"),
            ('{"pipeline_down/8/8/2": ["turnz", 4]}', "cannot be"),
            ('{"pipeline_down_weight/8/8/2": ["ping-pong", 4]}', "cannot be"),
            ('{"pipeline_down/8/8/2": ["ping-pong", 1]}', "cannot be"),
            ('{"pipeline_hidden/8/8/2": ["ping-pong", 5]}', "cannot be"),
        ],
    )
    def test_one_that_was_damaged_is_named(self, own: Path, text: str, reason: str) -> None:
        own.write_text(text)
        with pytest.raises(UserError, match=reason):
            lookup.blocks_for("up", sized(8, 8, 2))
        with pytest.raises(UserError, match=reason):
            write_winners({"up/8/8/2": Blocks(16, 16, 16, 4, 2)}, own)
        assert own.read_text() == text  # nothing is lost


def test_a_card_that_the_package_s_table_is_not_for_needs_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ACMOE_TUNED", raising=False)
    monkeypatch.setattr(tune, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(device_support, "has_large_shared_memory", lambda: False)
    with pytest.raises(UserError, match=r"for H100, H200 and B200, .* --table"):
        bench_tune(TuneConfig())


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written .*--table"):
        write_winners({}, tmp_path / "nowhere" / "tuned.json")


def test_the_package_sown_table_reads() -> None:
    table = tables.read_table(tables.TABLE)
    assert {name.split("/")[0] for name in table} >= {"up", "copy", "pipeline_down"}


def test_a_table_of_version_0_1_is_read_with_a_warning(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"ring_down/8/8/2": ["turns", 4], "ring_input/8/8/2": null, "copy/8/8/2": [true, false],'
        ' "ring_up_weight/8/8/2": ["together", 4, 0, 0, true]}'
    )
    with pytest.warns(FutureWarning, match="names pipelines as version 0.1 did"):
        rows = tables.read_table(path)
    assert rows == {
        "pipeline_down/8/8/2": ["ping-pong", 4],
        "pipeline_input/8/8/2": None,
        "copy/8/8/2": [True, False],
        "pipeline_up_weight/8/8/2": ["cooperative", 4, 0, True],
    }


def test_the_lead_of_an_older_row_is_left_out(tmp_path) -> None:
    """[form, stages, buffers, lead, gathers] is [form, stages, buffers, gathers] now."""
    path = tmp_path / "mine.json"
    path.write_text(
        '{"pipeline_down/8/8/2": ["cooperative", 4, 0, 3],'
        ' "pipeline_up_weight/8/8/2": ["cooperative", 4, 0, 0, true],'
        ' "pipeline_down_weight/8/8/2": ["cooperative", 4, 0, true]}'
    )
    assert tables.read_table(path) == {
        "pipeline_down/8/8/2": ["cooperative", 4, 0],
        "pipeline_up_weight/8/8/2": ["cooperative", 4, 0, True],
        "pipeline_down_weight/8/8/2": ["cooperative", 4, 0, True],
    }
