"""Images an adversary chooses: attacks on any classifier."""
