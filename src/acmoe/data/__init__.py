"""What the models read: corpora on disk, sentences, images, and mixtures known in closed form."""
