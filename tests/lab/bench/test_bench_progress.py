"""A benchmark says what it is doing, and says it apart from the report."""

import re

from acmoe.lab.bench.layers.layer import LayerConfig, bench_layer
from acmoe.lab.bench.layers.router import RouterBenchConfig, bench_router


def test_every_layer_is_named_before_it_is_built_and_the_shape_before_it_is_timed() -> None:
    said: list[str] = []
    config = LayerConfig(shapes=("tiny",), rivals=("torch",), repeat=2, dtype="fp32", device="cpu")
    report = bench_layer(config, say=said.append)
    assert said[:-1] == [
        "tiny: building and checking acmoe",
        "tiny: building and checking torch",
        "tiny: timing 2 layers, 2 rounds",
    ]
    # The times follow before the next shape begins.
    assert re.fullmatch(r"tiny: dense matmul [\d.e-]+ ms, acmoe/forward [\d.e-]+ ms, .*", said[-1])
    assert {row["contestant"] for row in report.rows} == {"dense matmul", "acmoe", "torch"}


def test_every_mode_of_statistics_is_named() -> None:
    said: list[str] = []
    config = RouterBenchConfig(shapes=("tiny",), repeat=2, dtype="fp32", device="cpu")
    bench_router(config, say=said.append)
    modes = ("plain", "batch", "running", "current")
    assert said[:-2] == [f"tiny: building and checking {mode}" for mode in modes]
    assert said[-2] == "tiny: timing, 2 rounds"
    assert said[-1].startswith("tiny: plain/forward+backward ")
