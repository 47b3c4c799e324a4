"""Choose the settings of the expert GEMMs by timing a few candidates at a layer's first use."""
