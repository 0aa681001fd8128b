"""Measurements behind the numbers in the documentation; run by `blend bench`."""
