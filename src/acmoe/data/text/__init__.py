"""Text: corpora, vocabularies, sentences and their batches."""
