"""BLEND's core: CLIP, methods, data and metrics. Imports neither Flower nor Ray.

This package initialiser stays empty of imports on purpose: the thin Flower ClientApp imports
`blend_core.messages` in a fresh process for every message and must not pay for torch.
"""

__version__ = "0.1.0"
