"""Write what the page shows of a model of transformers, beside its analysis.

The page then needs neither the model nor transformers.
"""

from dataclasses import asdict
from pathlib import Path

from acmoe.analyze.analysis import Analysis, LayerAnalysis
from acmoe.analyze.sampling import HuggingFaceModel, Sampled
from acmoe.evaluate.routing import LayerReport
from acmoe.report.experts import EXAMPLES, TextContext, tokens_by_expert
from acmoe.report.layers import shown_layer
from acmoe.report.routing import shown_tokens
from acmoe.report.runs import HF_MODEL, ROUTING
from acmoe.report.sample import pieces_sample, visible_piece
from acmoe.storage.atomic import replace_text
from acmoe.storage.strict_json import json_text

MOST_TOKENS = 2000  # tokens whose routing is written


def save_routing(sampled: Sampled, analysis: Analysis, folder: Path) -> Path:
    """Write what the page shows of a model of transformers, and return the path."""
    record, model = sampled.own, sampled.run
    assert isinstance(model, HuggingFaceModel)
    count = shown_tokens(MOST_TOKENS, [layer.num_experts for layer in record.layers], 1)
    count = min(count, len(model.pieces))
    sample = pieces_sample(model.pieces[:count], model.title)
    tokens = [visible_piece(piece) for piece in model.pieces]
    context = TextContext(tokens=tokens, unit=sample.content["unit"])
    document = {
        "kind": HF_MODEL,
        "router": model.router,
        "settings": model.settings,
        "loss": record.loss,
        "sample": asdict(sample),
        "statistics": record.statistics,
        "measured": record.sample,
        "measures": [asdict(_measures(layer)) for layer in analysis.layers],
        "layers": [shown_layer(layer, count) for layer in record.layers],
        "by_expert": [
            tokens_by_expert(layer, examples=EXAMPLES, context=context, among=len(tokens))
            for layer in record.layers
        ],
    }
    path = folder / ROUTING
    replace_text(path, json_text(document, indent=None) + "\n")
    return path


def _measures(layer: LayerAnalysis) -> LayerReport:
    change = layer.change
    return LayerReport(
        load=layer.load.share,
        load_balance=layer.load.std,
        instability=None if change is None else change.instability,
        chance=None if change is None else change.chance,
        adjusted_rand=None if change is None else change.adjusted_rand,
    )
