"""Sort routed rows by expert and tokens by cluster."""
