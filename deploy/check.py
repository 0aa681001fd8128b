"""Finds what cannot work before anything is written or started."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from blend_core.errors import ConfigError

if TYPE_CHECKING:
    from blend_core.backbone import Backbone
    from blend_core.config import BackboneConfig, Experiment


def check(experiment: Experiment) -> None:
    """Put clients, backbone, method and class names together, without weights and images.

    Raises:
        ConfigError: clients, data, backbone, method or privacy do not fit together.
        SiteError: images of a data set are missing.
    """
    from blend_core.data import class_names, client_names, prompt_template, require_data
    from blend_core.methods import build_method
    from blend_core.weights import require_source
    from server.budget import require_shared

    if client_names(experiment) is None:
        raise ConfigError("data.kind = 'folders' needs data.root, the folder of all sites")
    if experiment.server.require_keys:
        raise ConfigError(
            "server.require_keys: blend run starts its own SuperNodes, which have no keys; leave "
            "it out, or submit the run with flwr run (docs/deployment.md)"
        )
    require_data(experiment)
    require_source(experiment.backbone)
    method = build_method(experiment.method, _described(experiment.backbone), experiment.seed)
    require_shared(experiment, method.parameter_counts()["shared"])
    if names := class_names(experiment):
        method.tokenize(names, prompt_template(experiment))


@lru_cache(maxsize=1)
def _described(config: BackboneConfig) -> Backbone:
    """A backbone without weights; a sweep checks hundreds of runs of the same."""
    from blend_core.backbone import Backbone

    return Backbone.describe(config)
