"""Metrics that several studies of language models share."""

from acmoe.lab.study.study import Metric

BITS = (
    Metric("test", "test bits per byte", "lower"),
    Metric("valid_curve", "mean over the validation curve", "lower"),
    Metric("contaminated", "contaminated bits per byte", "lower"),
    Metric("enwik8", "EnWik-8 prefix, bits per byte", "lower"),
)
WORDS = (
    Metric("test", "test perplexity", "lower", 2),
    Metric("valid_curve", "mean over the validation curve", "lower", 2),
    Metric("contaminated", "contaminated perplexity", "lower", 2),
    Metric("wikitext103", "WikiText-103 validation perplexity", "lower", 2),
    Metric("sst2", "SST-2 accuracy (%)", "higher", 2),
    Metric("sst5", "SST-5 accuracy (%)", "higher", 2),
    Metric("banking77", "Banking-77 accuracy (%)", "higher", 2),
)
RUNNING = Metric("test_running", "test, running statistics")
# One model's figures on clean text, on corrupted text, and on text of another source.
ROBUST_BITS = (
    Metric("test", "clean", "lower"),
    Metric("contaminated 0.025", "2.5% replaced", "lower"),
    Metric("contaminated", "5% replaced", "lower"),
    Metric("enwik8", "EnWik-8 prefix", "lower"),
    Metric("enwik8 contaminated 0.025", "EnWik-8 prefix, 2.5% replaced", "lower"),
    Metric("enwik8 contaminated", "EnWik-8 prefix, 5% replaced", "lower"),
)
ROBUST_WORDS = (
    Metric("test", "clean", "lower", 2),
    Metric("contaminated", "2.5% replaced", "lower", 2),
    Metric("contaminated 0.05", "5% replaced", "lower", 2),
    Metric("wikitext103", "WikiText-103", "lower", 2),
    Metric("wikitext103 contaminated", "WikiText-103, 2.5% replaced", "lower", 2),
    Metric("wikitext103 contaminated 0.05", "WikiText-103, 5% replaced", "lower", 2),
)
SEPARATION = (
    Metric("within_share", "scatter within clusters, without M", digits=3),
    Metric("within_share_scaled", "with M", digits=3),
)
