"""Images: data sets, augmentation and batches."""
