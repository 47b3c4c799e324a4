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
