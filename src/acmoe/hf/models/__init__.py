"""The library's models as transformers models, and runs exported to the format of the hub."""
