"""Token-to-expert routing: affinity, top-k and gate."""
