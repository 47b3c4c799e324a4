"""MoE families that need more than what transformers declares, and `register_family` to add one.

Nearly every MoE model of transformers names its router class in `_can_record_outputs`, and its
router returns (logits, weights, chosen ids). `acmoe.hf.discovery` reads that and needs no row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acmoe.errors import check

# Router output -> scores (T, E), higher is better, and the chosen ids (T, K) or None.
Reader = Callable[[Any], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class TupleReader:
    """Read scores and chosen ids from fixed places of a router's output tuple.

    A router that returns one tensor returns its scores. Where integers stand in the place of the
    scores, the two have changed places: some routers returned their ids first in older versions.
    Ids are None where there are none; then the first choice is the argmax of the scores.
    """

    scores: int = 0
    ids: int | None = 2

    def __call__(self, output: Any) -> tuple[Tensor, Tensor | None]:
        if isinstance(output, Tensor):
            return _rows(output), None
        scores = output[self.scores]
        ids = None if self.ids is None or len(output) <= self.ids else output[self.ids]
        if ids is not None and not scores.is_floating_point():
            scores, ids = ids, scores
        scores_TE = _rows(scores)
        if ids is None or ids.is_floating_point():
            return scores_TE, None
        # len() would fix the number of tokens in a graph of torch.export.
        return scores_TE, ids.reshape(scores_TE.shape[0], -1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class CheckedReader:
    """Read a router by `read`, and raise where its scores do not have one column per expert."""

    read: Reader
    router: str  # dotted name
    num_experts: int

    def __call__(self, output: Any) -> tuple[Tensor, Tensor | None]:
        scores_TE, ids_TK = self.read(output)
        check(
            scores_TE.dim() == 2 and scores_TE.shape[1] == self.num_experts,
            f"{self.router} gave scores of shape {tuple(scores_TE.shape)}, not (T, "
            f"{self.num_experts}); update transformers, or describe the router's output by "
            "acmoe.hf.register_family(...)",
        )
        return scores_TE, ids_TK


def read_probabilities(output: Any) -> tuple[Tensor, Tensor | None]:
    """Read a router that returns probabilities first; their logarithms differ from its logits by a
    constant per token, so that a softmax over some of the experts is the same."""
    scores_TE, ids_TK = TupleReader()(output)
    return scores_TE.clamp(min=torch.finfo(scores_TE.dtype).tiny).log(), ids_TK


def read_zaya(output: Any) -> tuple[Tensor, Tensor | None]:
    """Read a ZayaRouter, whose last of E+1 columns means that the token skips the experts.

    The router reports a skip as expert 0 with weight 0; undo that, so that tokens that skip are a
    cluster of their own.
    """
    logits, weights_TK, ids_TK, _ = output
    scores_TE = _rows(logits)
    return scores_TE, ids_TK.masked_fill(weights_TK == 0, scores_TE.shape[-1] - 1)


class Jitter(NamedTuple):
    """Noise in training that a router multiplies into its input in place: the experts read the same
    tensor, and so the noise."""

    attribute: str  # its value in the router bounds the noise: uniform in 1 - value to 1 + value
    off: float | None  # value of the attribute with which the router draws none


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describe one router class; None means: as discovery finds it."""

    read: Reader | None = None
    num_experts: int | str | None = None  # columns of the scores, or the router's attribute
    dim: int | str | None = None  # features that the router reads, or the router's attribute
    ends_with: str = ""  # take only routers whose dotted name ends with this
    layer: str | None = None  # class of the decoder layers, where they stand in no ModuleList
    adaptable: bool = True
    jitter: Jitter | None = None
    note: str | None = None  # a warning; the name of the class is its subject
    refusal: str | None = None  # the reason why models with this router cannot be adapted


_NORM_INSIDE = (
    "normalises its input inside the router, which undoes the overall size of the rescaling; "
    "only the ratios between features act"
)

# By the name of the router class. A router of this table is found where no recorder names it, and
# a recorded module that holds one is taken for its MoE block.
FAMILIES: dict[str, Family] = {
    "Gemma4TextRouter": Family(read=read_probabilities, note=_NORM_INSIDE),
    "DiffusionGemmaTextRouter": Family(read=read_probabilities, note=_NORM_INSIDE),
    "ZayaRouter": Family(
        read=read_zaya,
        num_experts="num_router_classes",
        note="normalises a projection of its input, and adds the previous router's projection to "
        "it: the rescaling is partly undone",
    ),
    # Up to 5.17 transformers declares no recorder for these, or the block around them.
    "DbrxRouter": Family(read=TupleReader(), jitter=Jitter("moe_jitter_eps", off=None)),
    "HunYuanMoEV1Gate": Family(read=TupleReader()),
    "Llama4Router": Family(read=TupleReader(scores=1, ids=None)),
    # The experts that copy their token have columns and clusters of their own.
    "LongcatFlashTopkRouter": Family(read=TupleReader(), num_experts="n_routed_experts"),
    "PhimoeTopKRouter": Family(jitter=Jitter("input_jitter_noise", off=0.0)),
    "SwitchTransformersTop1Router": Family(
        note="jitters its input in training (router_jitter_noise), in float32 in place, so that "
        "the experts of a plain model read the noise too; those of an adaptive one do not"
    ),
    # Looks up the experts of a token id; the input only weighs them.
    "DeepseekV4HashRouter": Family(read=TupleReader(), adaptable=False),
    # The class also routes between attention projections; those routers stay as they are.
    "JetMoeTopKGating": Family(read=TupleReader(scores=4, ids=None), ends_with="mlp.router"),
    # The recorder names the block around a router for text and one for image tokens.
    "Ernie4_5_VLMoeMoeTopKRouter": Family(
        read=TupleReader(),
        ends_with="text_moe.gate",
        note="routes image tokens by a second router, which stays as it is; calls with image "
        "tokens give the text router a part of the tokens and are not supported",
    ),
    "DogeCDMoE": Family(
        refusal="it retrieves experts by product keys inside the block, so there is no router "
        "module whose input could be rescaled apart from the experts' input"
    ),
}


def family_of(module: nn.Module, name: str) -> Family | None:
    """Return the row of a module's class, or of the nearest base class whose row names this place.

    name: the module's dotted name in the model. The row of a base class, such as one that a user
    registers for `Linear`, does not concern a module elsewhere that happens to be derived from it.
    """
    own, *bases = (FAMILIES.get(cls.__name__) for cls in type(module).__mro__)
    rows = (row for row in bases if row is not None and name.endswith(row.ends_with))
    return next(rows, None) if own is None else own


def register_family(
    router: type[nn.Module] | str,
    *,
    read: Reader | None = None,
    scores: int = 0,
    ids: int | None = 2,
    num_experts: int | str | None = None,
    dim: int | str | None = None,
    ends_with: str = "",
    layer: str | None = None,
    adaptable: bool = True,
    note: str | None = None,
) -> None:
    """Describe the MoE router of a model that discovery does not know, before `attach`.

    Args:
        router: The class of the router modules, or its name. Its first argument must be the hidden
            states (..., D). A later call for the same class replaces the earlier one.
        read: Function of the router's output that returns scores (T, E), higher is better, and
            the chosen ids (T, K) or None. It must be defined at the top of a module, so that
            models can be copied and pickled.
        scores: Place of the scores in the router's output tuple, where `read` is not given.
        ids: Place of the chosen ids in that tuple; None where it has none.
        num_experts: Number of columns of the scores, or the name of the router's attribute that
            holds it. By default `router.num_experts`, or the output size of its only Linear.
        dim: Number of features that the router reads, likewise.
        ends_with: Take only routers whose dotted name in the model ends with this.
        layer: Name of the class of the decoder layers, where these are not the elements of an
            `nn.ModuleList` of the model.
        adaptable: False for a router that does not choose by its input, such as a hash router.
            It tells the next router the tokens' clusters, and is not rescaled itself.
        note: A warning that `attach` logs once, after the name of the class: "MyRouter {note}".

    Example: `register_family("MyRouter", scores=1, ids=0)` for a router of `trust_remote_code` that
    returns (ids, logits).
    """
    name = router if isinstance(router, str) else router.__name__
    check(
        name.isidentifier(),
        f"router={name!r} is not the name of a class; pass one, such as 'MyRouter'",
    )
    FAMILIES[name] = Family(
        read=read or TupleReader(scores=scores, ids=ids),
        num_experts=num_experts,
        dim=dim,
        ends_with=ends_with,
        layer=layer,
        adaptable=adaptable,
        note=note,
    )
