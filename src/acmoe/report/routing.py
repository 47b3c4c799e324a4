"""Route a sample with the best checkpoint of a run, and return plain values for the page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from acmoe.analyze.record import RoutingRecord, record_images, record_language
from acmoe.config.images.train import VISION_RUNS, SoftViTRunConfig
from acmoe.errors import UserError, check
from acmoe.evaluate.language import check_vocabulary
from acmoe.evaluate.routing import StageTally
from acmoe.evaluate.run import LANGUAGE_RUN, RunFolder, open_image_run, open_run
from acmoe.report.attacked import attacked_routing
from acmoe.report.experts import (
    ExpertTokens,
    TextContext,
    examples_per_expert,
    fewer_examples,
    tokens_by_expert,
)
from acmoe.report.layers import ShownLayer, fewer_tokens, shown_layer
from acmoe.report.runs import HF_MODEL, ROUTING, RunFacts, read_routing_file
from acmoe.report.sample import Sample, image_sample, text_sample, visible_tokens
from acmoe.routing.state import Routing
from acmoe.runtime import pick_device

# Load and instability are measured over this many tokens: about a second with a nano model.
MEASURED_TOKENS = 8192
MEASURED_IMAGES = 64
SHOWN_IMAGES = 12
MOST_AFFINITIES = 600_000  # numbers on one page, about 3 MB


@dataclass(frozen=True, kw_only=True)
class RunRouting:
    """Routing of one run, as the page's explorer shows it."""

    sample: Sample
    step: int | None  # optimizer step of the checkpoint; None for a model of transformers
    statistics: str
    measured: str  # description of the sample that load and instability are measured over
    measures: list[dict[str, Any]]  # one LayerReport per layer
    layers: list[ShownLayer]  # routing of the shown tokens
    predicted: list[str] | None  # images: the predicted class of each
    by_expert: list[ExpertTokens] | None = None  # by layer; None in a file of an earlier version
    # SoftMoE: every expert reads every patch, and a gate is a summed combine weight.
    soft: bool = False
    attacked: dict[str, Any] | str | None = None  # images: after an attack, or why not

    def to_json(self, sample: int) -> dict[str, Any]:
        """Return the values for the page; `sample` is the index of the sample there."""
        return {**vars(self), "sample": sample}


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """The record of a run, and what the page shows of it besides the routing itself."""

    record: RoutingRecord
    sample: Sample
    context: TextContext | None = None
    predicted: list[str] | None = None
    attacked: dict[str, Any] | str | None = None

    def by_expert(self, share: int) -> list[ExpertTokens]:
        """Return examples of the tokens of each layer's experts.

        For text they are drawn from all tokens, for images from those that the page shows.
        """
        layers = self.record.layers
        examples = examples_per_expert([layer.num_experts for layer in layers], share)
        return [
            tokens_by_expert(
                layer,
                examples=examples,
                context=self.context,
                among=len(layer.cluster) if layer.grid is None else self.sample.items(layer.grid),
            )
            for layer in layers
        ]


class RoutingReader:
    """Route a sample once per checkpoint, and reuse the result when the page is made again."""

    def __init__(self, *, tokens: int, device: str) -> None:
        self.tokens, self.device = tokens, device
        self._known: dict[Path, tuple[object, RunRouting | str]] = {}

    def read(self, run: RunFacts, share: int) -> RunRouting | str:
        """Return the run's routing, or one line that says why there is none.

        `share` is the number of runs on the page, which limits the tokens shown of each.
        """
        try:
            folder = _version_of(run)
            version = (folder, folder.stat().st_mtime_ns, share)
        except (UserError, OSError) as error:
            return str(error)
        known = self._known.get(run.folder)
        if known is None or known[0] != version:
            known = (version, self._read(run, share))
            self._known[run.folder] = known
        return known[1]

    def _read(self, run: RunFacts, share: int) -> RunRouting | str:
        try:
            if run.kind == HF_MODEL:
                return read_routing(run.folder, self.tokens, share)
            found = self._recorded(run, share)
            step = RunFolder(folder=run.folder).step("best")
        except (UserError, OSError) as error:
            return str(error)
        record, sample = found.record, found.sample
        return RunRouting(
            sample=sample,
            step=step,
            statistics=record.statistics,
            measured=record.sample,
            measures=_measures(record),
            layers=[shown_layer(layer, sample.items(layer.grid)) for layer in record.layers],
            predicted=found.predicted,
            by_expert=found.by_expert(share),
            soft=run.kind == SoftViTRunConfig.kind,
            attacked=found.attacked,
        )

    def _recorded(self, run: RunFacts, share: int) -> _Recorded:
        if run.kind in VISION_RUNS:
            return self._images(run)
        check(
            run.kind == LANGUAGE_RUN,
            f"{run.folder} is a {run.kind}; routing is shown of language models and of image "
            "classifiers",
        )
        return self._text(run, share)

    def _images(self, run: RunFacts) -> _Recorded:
        vision = open_image_run(run.folder)
        images, model = vision.images().test, vision.model(device=pick_device(self.device))
        record = record_images(
            model,
            images,
            vision.config.data,
            count=MEASURED_IMAGES,
            precision=vision.config.precision,
        )
        assert record.predicted is not None
        predicted = [images.classes[one] for one in record.predicted[:SHOWN_IMAGES].tolist()]
        return _Recorded(
            record=record,
            sample=image_sample(record, images, SHOWN_IMAGES),
            predicted=predicted,
            attacked=attacked_routing(model, vision, images, record, shown=len(predicted)),
        )

    def _text(self, run: RunFacts, share: int) -> _Recorded:
        language = open_run(run.folder)
        corpus, model = language.corpus(), language.model(device=pick_device(self.device))
        check_vocabulary(model.config.vocab_size, corpus)
        record = record_language(
            model,
            corpus["test"],
            tokens=max(self.tokens, MEASURED_TOKENS),
            precision=language.config.precision,
            title=f"{corpus.title}, test",
        )
        shown = shown_tokens(self.tokens, [layer.num_experts for layer in record.layers], share)
        sample = text_sample(record, corpus, shown)
        tokens = visible_tokens(record, corpus)
        return _Recorded(
            record=record,
            sample=sample,
            context=TextContext(tokens=tokens, unit=sample.content["unit"]),
        )


def _version_of(run: RunFacts) -> Path:
    """Return the file or folder that changes when the run's routing does."""
    if run.kind == HF_MODEL:
        return run.folder / ROUTING
    return RunFolder(folder=run.folder).checkpoint("best")


def shown_tokens(wanted: int, experts: Sequence[int], share: int) -> int:
    """Return how many tokens fit on a page of `share` runs, at least 64."""
    return min(wanted, max(64, MOST_AFFINITIES // (share * sum(experts))))


def read_routing(folder: Path, tokens: int, share: int) -> RunRouting:
    """Return the routing of the first tokens that `acmoe analyze --hf` wrote."""
    document = read_routing_file(folder)
    try:
        sample, layers = document["sample"], document["layers"]
        count = shown_tokens(tokens, [layer["experts"] for layer in layers], share)
        count = min(count, sample["count"])
        content = {**sample["content"], "tokens": sample["content"]["tokens"][:count]}
        content["breaks"] = [place for place in content["breaks"] if place < count]
        examples = examples_per_expert([layer["experts"] for layer in layers], share)
        by_expert = document.get("by_expert")
        return RunRouting(
            sample=Sample(mark=sample["mark"], count=count, content=content),
            step=None,
            statistics=document["statistics"],
            measured=document["measured"],
            measures=document["measures"],
            layers=[fewer_tokens(layer, count) for layer in layers],
            predicted=None,
            by_expert=by_expert and [fewer_examples(one, examples) for one in by_expert],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / ROUTING} is damaged ({error!r}); run acmoe analyze --hf again"
        ) from error


def _measures(record: RoutingRecord) -> list[dict[str, Any]]:
    """Measure load and instability of every layer, the latter within a Swin stage only."""
    tally = StageTally()
    nothing = torch.zeros(())
    tally.add(
        [
            Routing(one.expert_ids, one.gate, one.affinity, nothing, one.first)
            for one in record.layers
        ]
    )
    return [asdict(layer) for layer in tally.layers()]
