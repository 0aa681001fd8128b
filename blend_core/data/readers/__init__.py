"""Readers of data sets, one module per format: `read(description, root) -> Dataset`."""
