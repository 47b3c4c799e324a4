"""Config -> trained model."""
