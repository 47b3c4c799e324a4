"""How fast: the layer beside its rivals, the adaptive router's price, whole training steps."""
