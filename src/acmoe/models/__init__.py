"""Models map token ids or images to logits, and pass the routing state from block to block."""
