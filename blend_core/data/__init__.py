"""Images and labels of clients: the built-in benchmark, site folders, few-shot, partitions."""

from blend_core.data.client_data import ClientData, Labelled
from blend_core.data.sources import class_names, client_names, load_client_data
from blend_core.data.transforms import Preprocess

__all__ = [
    "ClientData",
    "Labelled",
    "Preprocess",
    "class_names",
    "client_names",
    "load_client_data",
]
