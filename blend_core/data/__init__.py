"""Images and labels of clients: the papers' data sets, shapes, site folders, partitions."""

from blend_core.data.client_data import ClientData, Labelled
from blend_core.data.site_images import file_stamp, site_stamp
from blend_core.data.sources import (
    class_names,
    client_names,
    dealt_data,
    load_client_data,
    prompt_template,
    require_data,
)
from blend_core.data.transforms import Preprocess

__all__ = [
    "ClientData",
    "Labelled",
    "Preprocess",
    "class_names",
    "client_names",
    "dealt_data",
    "file_stamp",
    "load_client_data",
    "prompt_template",
    "require_data",
    "site_stamp",
]
