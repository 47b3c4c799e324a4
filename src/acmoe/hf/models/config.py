"""The transformers config of every model of this library: a wrapper around the library's own."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from transformers import PreTrainedConfig

from acmoe.config.serialize import decode, encode
from acmoe.config.text.language import LANGUAGE_MODELS, LanguageConfig
from acmoe.errors import check, check_choice
from acmoe.models.registry import FAMILIES

Head = Literal["clean", "paper"]


class AcmoeConfig(PreTrainedConfig):  # type: ignore[misc]
    """`model` is the library's config as JSON values, all fields written out.

    Fields with names that transformers knows (vocab_size, hidden_size, ...) are computed from it.

    Args:
        model: what `acmoe.config.serialize.encode` returns; None: switch-nano with the plain
            router.
        family: "language", "swin" or "softmoe".
        head: form of the classification head on a language model, see `FinetuneConfig.form`.
        head_dropout: dropout inside the head of form "paper".
        eval_capacity: capacity factor of an image model's experts in evaluation mode; None: no
            token is dropped, as in `acmoe evaluate`, so that images do not influence each other.
        output_router_logits: return each MoE layer's affinities (T, E) in every forward pass.
    """

    model_type = "acmoe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *("past_key_values", "router_logits", "aux_loss")
    ]

    def __init__(
        self,
        model: Mapping[str, Any] | None = None,
        family: str = "language",
        head: Head = "clean",
        head_dropout: float = 0.1,
        eval_capacity: float | None = None,
        output_router_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        check_choice(family, tuple(FAMILIES), "family")
        check_choice(head, ("clean", "paper"), "head")
        check(
            model is not None or family == "language",
            f"family={family!r} needs model=...; use AcmoeConfig.of(model.config)",
        )
        self.model = encode(LANGUAGE_MODELS["switch-nano"].config) if model is None else dict(model)
        self.family, self.head, self.head_dropout = family, head, head_dropout
        self.eval_capacity, self.output_router_logits = eval_capacity, output_router_logits
        self._set_common_names(kwargs)
        super().__init__(**kwargs)

    def _set_common_names(self, kwargs: dict[str, Any]) -> None:
        """Set the names that generation, the Trainer and pipelines read."""
        found = self.library
        if isinstance(found, LanguageConfig):
            self.vocab_size, self.hidden_size = found.vocab_size, found.dim
            self.num_hidden_layers = len(found.sequence)
            self.num_attention_heads = found.heads
        else:
            self.hidden_size, self.image_size = found.dim, found.image_size
            self.num_channels = found.channels
            if kwargs.get("id2label") is None:
                kwargs.setdefault("num_labels", found.num_classes)
        kwargs.setdefault("tie_word_embeddings", False)

    @property
    def library(self) -> Any:
        """The library's config: a `LanguageConfig`, `SwinConfig` or `SoftViTConfig`."""
        return decode(self.model, FAMILIES[self.family].config, "config.json")

    @property
    def language(self) -> LanguageConfig:
        """The library's config of a language model; raise for an image model."""
        check(
            self.family == "language",
            f"this checkpoint is an image model ({self.family}); load it with "
            "AutoModelForImageClassification",
        )
        return cast(LanguageConfig, self.library)

    @classmethod
    def of(cls, config: object, **kwargs: Any) -> "AcmoeConfig":
        """Return the transformers config of a library config."""
        for name, family in FAMILIES.items():
            if isinstance(config, family.config):
                return cls(model=encode(config), family=name, **kwargs)
        check(False, f"{type(config).__name__} is no model config; see acmoe.list_models()")
        raise AssertionError
