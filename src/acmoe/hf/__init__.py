"""HuggingFace transformers models: find their MoE routers and make them adaptive.

Importing this package imports transformers; `import acmoe` does not.
"""

from acmoe.hf.families import register_family

__all__ = ["register_family"]
