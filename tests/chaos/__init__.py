"""A small federation of real processes, one fault per case, and the bytes it ends with."""
