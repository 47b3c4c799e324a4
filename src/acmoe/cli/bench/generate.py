"""`acmoe bench generate`: the speed of decoding."""

from dataclasses import dataclass

from acmoe.cli.arguments.shared import Device, Json
from acmoe.cli.bench.output import command_of, say, show


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Time text generation, in tokens per second: plain steps, captured steps, transformers."""

    models: tuple[str, ...] = ()
    """Models to measure, by their names in `acmoe models`, or olmoe: a model of OLMoE's size with
    random weights. If none is given: switch-medium and olmoe on a GPU, switch-nano on a CPU."""
    batches: tuple[int, ...] = (1, 64)
    """Numbers of sequences."""
    contestants: tuple[str, ...] = ("plain", "captured", "transformers")
    """Ways to decode. `captured` replays a CUDA graph; `transformers` runs OLMoE of that package
    with a static cache, beside the model olmoe, if it is installed."""
    router: tuple[str, ...] = ("smoe",)
    """Routers of the models of acmoe, timed in turn: `--router smoe adaptive` shows what adaptive
    clustering adds to a step."""
    prompt: int = 128
    """Tokens of each prompt."""
    tokens: int = 128
    """New tokens of each sequence."""
    repeat: int = 3
    """Number of calls, of which the fastest counts."""
    dtype: str = "bf16"
    """Data type of the weights: bf16, fp16 or fp32."""
    device: Device = "auto"
    json: Json = False
    save: bool = False
    """Also write benchmarks/results/DATE-generate-DEVICE.json."""

    def run(self) -> int:
        from acmoe.lab.bench.models.generate import GenerateBenchConfig, bench_generate

        config = GenerateBenchConfig(
            models=self.models,
            batches=self.batches,
            contestants=self.contestants,
            router=self.router,
            prompt=self.prompt,
            tokens=self.tokens,
            repeat=self.repeat,
            dtype=self.dtype,
            device=self.device,
        )
        report = bench_generate(config, command=command_of("generate", self), say=say)
        return show(report, json=self.json, save=self.save)
