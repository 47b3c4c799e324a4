"""The studies of long runs: their questions, comparisons and the paper's figures."""

from acmoe.lab.study.grids.long import (
    BYTE_RATES,
    WORD_RATES,
    byte_settings,
    long_study,
    long_words_study,
    nano_long,
    published_conditions,
)
from acmoe.lab.study.grids.nano import TEXT_SETTING
from acmoe.lab.study.metrics import (
    BITS,
    ROBUST_BITS,
    ROBUST_WORDS,
    RUNNING,
    SEPARATION,
    WORDS,
)
from acmoe.lab.study.study import ROUTER_METRICS, Metric, PaperFigure, Part, Study

_LONG = (
    Metric("diverged", "diverged (share of runs)", digits=2),
    Metric("rise", "greatest rise of the validation loss (nats)", digits=3),
)

LONG = Study(
    name="long",
    question="Does adaptive clustering help the paper's EnWik-8 model in runs of 246 million "
    "tokens and more, and does the plain router diverge at a constant rate?",
    note="The recipe switch-enwik8 on enwiki15 bytes: batch statistics, one forward pass per "
    "update, bf16, 24,576 tokens an update, no clipping. The rate falls as a cosine from 7e-4, or "
    "the rate in a setting's name, to a tenth of it, except in `constant`: 7e-4 after a "
    "quarter of the updates, no balance loss. The paper's runs have 1.97 billion tokens. A run has "
    "diverged where its last validation loss is 0.3 nats "
    "above its best, or a loss is not finite; the latter have no test figures. `distance` "
    "chooses the nearest expert in M (docs/theory.md) and is run with balance 0.01 only. `fade` is "
    "adaptive-previous with M to a power that falls from 1 to 0 in the first half of the updates: "
    "then, and in all tests, it is the plain router. `published` is the model as the published "
    "code builds it, with its own gate in layers 3 to 8 and no balance loss; `published-control` "
    "is the same model with M = I.",
    parts=(
        Part(byte_settings(), long_study),
        Part((TEXT_SETTING,), nano_long, reads_data=False),
    ),
    seeds=4,
    declared_pairs=4,
    declared_in={
        "switch-enwik8, constant": 2,
        "switch-enwik8, published": 2,
        "switch-enwik8, rate 0.00035": 1,  # 0.0014 was chosen: by the rule it has four
    },
    rates=BYTE_RATES,
    comparisons=(
        ("adaptive-previous", "smoe"),
        ("adaptive-current", "smoe"),
        ("distance", "smoe"),
        ("fade", "smoe"),
        *([("published", "published-control")] if published_conditions() else []),
    ),
    compared=(*BITS, Metric("contaminated 0.025", "contaminated 2.5%, bits per byte", "lower")),
    descriptive=(*_LONG, RUNNING, *ROUTER_METRICS, *SEPARATION),
    robustness=ROBUST_BITS,
    curve_label="validation bits per byte",
    difference_curves=True,
    routing_curves=True,
    paper=(PaperFigure("test bits per byte, EnWik-8, 80,000 steps", "1.153", "1.137", "Table 1"),),
)

LONG_WORDS = Study(
    name="long-words",
    question="Does it help the paper's models of words in runs of 123 million tokens?",
    note="The recipes on enwiki15 words with the 50,000 most frequent words: batch statistics, one "
    "forward pass per update, bf16, 24,576 tokens an update, a rate that falls as a cosine from "
    "7e-4, or the rate in a setting's name, to a tenth of it. The paper's runs have 983 "
    "million tokens (Switch-small).",
    grid=long_words_study,
    seeds=4,
    declared_pairs=4,
    declared_in={"switch-small, rate 0.00035": 1},
    rates=WORD_RATES,
    comparisons=(("adaptive-previous", "smoe"), ("adaptive-current", "smoe")),
    compared=(
        *WORDS[:4],
        Metric("contaminated 0.05", "contaminated 5%, perplexity", "lower", 2),
    ),
    descriptive=(*_LONG, RUNNING._replace(digits=2), *ROUTER_METRICS, *SEPARATION),
    robustness=ROBUST_WORDS,
    curve_label="validation perplexity",
    difference_curves=True,
    routing_curves=True,
    paper=(
        PaperFigure(
            "WikiText-103 perplexity, Switch-small, 40,000 steps", "87.94", "85.07", "Table 3"
        ),
        PaperFigure("WikiText-103 perplexity, Switch-medium", "35.48", "34.42", "Table 1"),
        PaperFigure(
            "WikiText-103 perplexity, GLaM-small, 60,000 steps", "58.27", "54.55", "Table 3"
        ),
    ),
)
