"""HuggingFace transformers: importing this package registers what it adds there."""

from acmoe.hf.experts import experts_reason as experts_reason
