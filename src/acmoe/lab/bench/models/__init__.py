"""The benchmarks of whole models: training steps, decoding, and models of transformers."""
