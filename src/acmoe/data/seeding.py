"""Derive independent random seeds from one seed, equal on all machines and library versions."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Hash a seed and a purpose to a 63-bit seed. Neighbouring seeds give unrelated results."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
