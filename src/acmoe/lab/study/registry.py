"""All studies by name, each with its question, grid, comparisons and the paper's figures."""

import difflib
from functools import partial
from itertools import product

from acmoe.errors import check
from acmoe.lab.study.grids.ablations import (
    BYTE_SETTING,
    WORD_SETTING,
    ablation_comparisons,
    byte_ablations,
    nano_ablations,
    word_ablations,
)
from acmoe.lab.study.grids.images import PGD_RADII, vision_study
from acmoe.lab.study.grids.nano import (
    IMAGE_SETTING,
    RADII,
    TEXT_SETTING,
    nano_images,
    nano_language,
)
from acmoe.lab.study.grids.text import TASKS, WORD_SETTINGS, bytes_study, word_cells, word_setting
from acmoe.lab.study.grids.variants import (
    FRESH_SEED,
    confirm_comparisons,
    confirm_study,
    nano_variants,
    variant_comparisons,
    variants_study,
)
from acmoe.lab.study.long_runs import LONG, LONG_WORDS
from acmoe.lab.study.metrics import BITS as _BITS
from acmoe.lab.study.metrics import RUNNING as _RUNNING
from acmoe.lab.study.metrics import WORDS as _WORDS
from acmoe.lab.study.study import ROUTER_METRICS, Metric, PaperFigure, Part, Study
from acmoe.lab.study.synthetic.cells import SYNTHETIC_CONDITIONS, synthetic_study

BYTES = Study(
    name="bytes",
    question="Does adaptive clustering lower the bits per byte of a Switch model, and is it the "
    "scale or the normalised embeddings of the published gate that does it?",
    grid=bytes_study,
    seeds=5,
    comparisons=(
        ("adaptive-previous", "smoe"),
        ("adaptive-current", "smoe"),
        ("control", "smoe"),
        ("reference-lm", "control"),
        ("metric", "smoe"),
    ),
    compared=_BITS,
    descriptive=(_RUNNING, *ROUTER_METRICS),
    curve_label="validation bits per byte",
    paper=(
        PaperFigure("test bits per byte, EnWik-8, 80,000 steps", "1.153", "1.137", "Table 1"),
        PaperFigure("load balance, Switch-medium", "5.577 ± 4.131", "5.317 ± 2.622", "Table 6"),
    ),
)

WORDS = Study(
    name="words",
    question="Does it lower perplexity on words, clean and contaminated, and help finetuning?",
    note="Finetuning is the same for all, from the weights after the last step, and scored at the "
    "epoch that was best in development. Epochs, sentences of an update, rate: "
    + "; ".join(f"{task.task} {task.epochs}, {task.batch}, {task.lr:g}" for task in TASKS)
    + ". The most frequent class is 50, 29 and 1 % of the test sentences.",
    parts=tuple(Part((word_setting(*one),), partial(word_cells, *one)) for one in WORD_SETTINGS),
    seeds=5,
    comparisons=(
        ("adaptive-previous", "smoe"),
        ("adaptive-current", "smoe"),
        ("metric", "smoe"),
    ),
    compared=_WORDS,
    descriptive=(_RUNNING._replace(digits=2), *ROUTER_METRICS),
    curve_label="validation perplexity",
    paper=(
        PaperFigure(
            "WikiText-103 perplexity, Switch-small, 40,000 steps", "87.94", "85.07", "Table 3"
        ),
        PaperFigure(
            "WikiText-103 perplexity, GLaM-small, 60,000 steps", "58.27", "54.55", "Table 3"
        ),
        PaperFigure("contaminated perplexity, Switch-medium", "48.12", "47.61", "Table 2"),
        PaperFigure("SST-2 accuracy, Switch-medium", "76.27", "77.32", "Table 1"),
        PaperFigure("SST-5 accuracy, Switch-medium", "39.13", "40.04", "Table 1"),
        PaperFigure("Banking-77 accuracy, Switch-medium", "83.82", "86.01", "Table 1"),
    ),
)

VISION = Study(
    name="vision",
    question="Is an image classifier better, or harder to fool, with adaptive clustering?",
    note="Imagenette at 112 pixels, a tenth of its training images kept back for the curves; "
    "figures are of its 3,925 validation images, attacks of the first of them in one fixed order, "
    "the same for every cell: 256 by FGSM and PGD, 32 by SPSA, unless the sizes below say "
    "otherwise. Training images are cropped and mirrored, no more. In pixels, with true labels "
    "and within the range of images, PGD takes 10 steps of 0.3 of its radius; the paper's way is "
    "in normalised space, without that bound, away from the model's own answer, 20 steps of 0.15. "
    "Gradients are taken in bf16, images scored in fp32. SPSA takes 8 steps of 16 directions, a "
    "twentieth of what is usual, so it is a weak one; it asks 512 images at a time. `published` "
    "takes statistics of the batch when it is scored, too: 128 images, 256 under attack.",
    grid=vision_study,
    seeds=5,
    comparisons=(("adaptive-previous", "smoe"), ("published", "smoe"), ("metric", "smoe")),
    compared=(
        Metric("test", "top-1 (%)", "higher", 2),
        Metric("fgsm 1/255", "FGSM 1/255", "higher", 2),
        *(Metric(f"pgd {n}/255", f"PGD {n}/255", "higher", 2) for n in PGD_RADII),
        Metric("spsa 8/255", "SPSA 8/255", "higher", 2),
        Metric("fgsm-paper 1/255", "FGSM 1/255, paper's way", "higher", 2),
        Metric("pgd-paper 1/255", "PGD 1/255, paper's way", "higher", 2),
        Metric("spsa-paper 1", "SPSA 1, paper's way", "higher", 2),
    ),
    descriptive=(
        Metric("pgd 1/255 moved", "tokens moved by PGD 1/255 (%)", digits=2),
        *ROUTER_METRICS,
    ),
    curve_label="validation top-1 (%)",
    paper=(
        PaperFigure("ImageNet top-1, Swin, one expert", "75.22", "75.39", "Table 4"),
        PaperFigure("ImageNet top-1, Swin, two experts", "76.10", "76.31", "Table 4"),
        PaperFigure("PGD 1/255, Swin, one expert", "39.69", "40.66", "Table 4"),
        PaperFigure("PGD 1/255, Swin, two experts", "40.85", "43.74", "Table 4"),
        PaperFigure("FGSM 1/255, Swin, one expert", "52.84", "53.43", "Table 4"),
        PaperFigure("FGSM 1/255, Swin, two experts", "54.70", "55.78", "Table 4"),
        PaperFigure("SPSA 1, Swin, one expert", "59.92", "59.97", "Table 4"),
        PaperFigure("SPSA 1, Swin, two experts", "60.57", "63.47", "Table 4"),
        PaperFigure("ImageNet top-1, SoftMoE", "72.86", "73.21", "appendix, Soft-ACMoE"),
        PaperFigure("PGD 1/255, SoftMoE", "45.29", "48.25", "appendix, Soft-ACMoE"),
        PaperFigure("FGSM 1/255, SoftMoE", "56.95", "59.01", "appendix, Soft-ACMoE"),
        PaperFigure("SPSA 1, SoftMoE", "66.59", "70.63", "appendix, Soft-ACMoE"),
    ),
)

ABLATIONS = Study(
    name="ablations",
    question="Which choice inside the router matters?",
    note="The nano size is for two CPU cores and needs no data folder (--settings nano). There "
    "back-half is skip-1, and three of the four layers can be adaptive. Its step times are of "
    "cores that other work shared: they compare nothing.",
    parts=(
        Part((BYTE_SETTING,), byte_ablations),
        Part((WORD_SETTING,), word_ablations),
        Part((TEXT_SETTING,), nano_ablations, reads_data=False),
    ),
    seeds=3,
    comparisons=ablation_comparisons(),
    compared=(
        Metric("test", "test (bits per byte, or perplexity)", "lower"),
        Metric("contaminated", "contaminated", "lower"),
    ),
    descriptive=(_RUNNING, *ROUTER_METRICS),
    curve_label="validation (bits per byte, or perplexity)",
    paper=(
        PaperFigure("perplexity, Switch-medium, variance for MAD", "34.87", "34.42", "appendix"),
        PaperFigure("perplexity, Switch-medium, full for skip-1", "34.88", "34.42", "appendix"),
        PaperFigure("perplexity, Switch-medium, random scale", "38.17", "34.42", "appendix"),
        PaperFigure("perplexity, Switch-medium, Mix 2 for Mix 1", "34.66", "34.42", "appendix"),
        PaperFigure("perplexity, Switch-medium, fixed threshold", "35.20", "34.14", "appendix"),
        PaperFigure("perplexity, Switch-medium, learned threshold", "34.29", "33.49", "appendix"),
    ),
)

VARIANT_STUDY = Study(
    name="remedies",
    question="If the paper's form does not win, does anything the mathematics offers?",
    note="The nano size is for two CPU cores and needs no data folder (--settings nano); its step "
    "times are of cores that other work shared.",
    parts=(
        Part((BYTE_SETTING,), variants_study),
        Part((TEXT_SETTING,), nano_variants, reads_data=False),
    ),
    seeds=3,
    comparisons=variant_comparisons(),
    compared=(_BITS[0], _BITS[1], _BITS[2]),
    descriptive=(_RUNNING, *ROUTER_METRICS),
    curve_label="validation bits per byte",
)

CONFIRM = Study(
    name="confirm",
    question="Do the variants that were chosen on other seeds equal or beat the plain router on "
    "fresh ones?",
    note="Chosen before these runs: of the variants that had seeds 0 and 1 in the study above, the "
    "three whose test bits per byte were closest to the plain router's, or below. The text is the "
    "same, the first weights and the order of the data are new, and this is asked once.",
    grid=confirm_study,
    seeds=5,
    first_seed=FRESH_SEED,
    comparisons=confirm_comparisons(),
    compared=VARIANT_STUDY.compared,
    descriptive=VARIANT_STUDY.descriptive,
    curve_label=VARIANT_STUDY.curve_label,
)

SYNTHETIC = Study(
    name="synthetic",
    question="In the case the theory describes, are the clusters found faster, and how does that "
    "depend on contrast, dimension and noise?",
    grid=synthetic_study,
    reads_data=False,
    seeds=5,
    comparisons=tuple((name, "smoe") for name in SYNTHETIC_CONDITIONS if name != "smoe"),
    compared=(
        Metric("ari_area", "agreement with the clusters, mean over training", "higher"),
        Metric("ari", "agreement at the end", "higher"),
        Metric("loss", "held-out loss (share of variance)", "lower"),
        Metric("steps_to_threshold", "steps to the threshold", "lower", 1),
    ),
    descriptive=(
        Metric("load_balance", "load balance (std, points)", digits=2),
        Metric("scale_rms_log", "rms of log M", digits=3),
        Metric("condition", "condition number", digits=1),
        Metric("condition_plain", "without M", digits=1),
    ),
    curve="ari",
    curve_label="agreement with the true clusters (adjusted Rand)",
)

NANO = Study(
    name="nano",
    question="What does the comparison show at a size that two CPU cores finish in half an hour, "
    "on data that come with Python and scikit-learn?",
    note="Bytes are the source text of the standard library, another text in another version of "
    "Python; each record has its fingerprint. Digits have 266 test images, the same for every "
    "seed: were they drawn anew, an accuracy near 95 % would vary by 1.3 points (one binomial "
    "standard deviation), one near 50 % by 3.1. The intervals below are over seeds and do not "
    "contain that. Attacks are in pixels with true labels, PGD with 6 steps; digits are scaled to "
    "32 pixels a side.",
    parts=(
        Part((TEXT_SETTING,), nano_language, reads_data=False),
        Part((IMAGE_SETTING,), nano_images, reads_data=False),
    ),
    seeds=5,
    comparisons=(*BYTES.comparisons, ("published", "smoe")),
    compared=(
        *(metric._replace(setting=TEXT_SETTING) for metric in _BITS[:3]),
        Metric("test", "top-1 (%)", "higher", 2, IMAGE_SETTING),
        *(
            Metric(f"{attack.lower()} {n}/255", f"{attack} {n}/255", "higher", 2, IMAGE_SETTING)
            for attack, n in product(("FGSM", "PGD"), RADII)
        ),
    ),
    descriptive=(
        _RUNNING,
        Metric("pgd 1/255 moved", "tokens moved by PGD 1/255 (%)", digits=2),
        Metric("pgd 8/255 moved", "tokens moved by PGD 8/255 (%)", digits=2),
        *ROUTER_METRICS,
    ),
    curve_label="validation bits per byte, or top-1 (%)",
)

STUDIES = {
    study.name: study
    for study in (
        *(BYTES, WORDS, LONG, LONG_WORDS, VISION),
        *(ABLATIONS, VARIANT_STUDY, CONFIRM, SYNTHETIC, NANO),
    )
}


def study_of(name: str) -> Study:
    """Return the study of that name; raise a UserError with a suggestion for an unknown one."""
    near = difflib.get_close_matches(name, STUDIES, n=1)
    meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(STUDIES)}"
    check(name in STUDIES, f"study {name!r} is unknown; {meant}")
    return STUDIES[name]
