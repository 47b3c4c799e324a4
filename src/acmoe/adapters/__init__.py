"""Adapters between this library's models and other libraries."""
