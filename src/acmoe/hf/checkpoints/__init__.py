"""Attached models on disk: their classes and config, their statistics beside adapters, loading.

classes, config, auto, options     the class and config of an attached model, and how
                                   transformers finds them
plain_load                         a warning where a plain class loads such a model
conversion                         names in checkpoint files -> names of modules
statistics, adapters, hotswap,     statistics in a file of their own, beside adapters
    trainer
load                               read any model and its tokenizer from a folder
"""
