"""Cross-entropy that never holds all logits."""
