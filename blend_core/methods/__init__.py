"""One module per method; the registry that finds them by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from blend_core.config import MethodConfig
from blend_core.errors import ConfigError

if TYPE_CHECKING:
    from blend_core.backbone import Backbone
    from blend_core.methods.base import Method

_METHODS = {
    "blend": "blend_core.methods.blend:Blend",
    "zero-shot": "blend_core.methods.zero_shot:ZeroShot",
}


def method_names() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(_METHODS)


def method_class(name: str) -> type[Method]:
    """The class of a method by its name. Raises `ConfigError` for an unknown one."""
    if name not in _METHODS:
        raise ConfigError(f"method.name = {name!r}: unknown; known: {', '.join(method_names())}")
    module, attribute = _METHODS[name].split(":")
    found: type[Method] = getattr(import_module(module), attribute)
    return found


def config_class(name: str) -> type[MethodConfig]:
    """The configuration class of a method by its name."""
    return method_class(name).Config


def build_method(config: MethodConfig, backbone: Backbone, seed: int) -> Method:
    """Build a method with its initial tensors, which depend on the seed alone.

    Args:
        config: configuration of the method.
        backbone: the frozen CLIP; a weightless one (`Backbone.describe`) will do to learn
            names, shapes and initial values of the tensors.
        seed: the run's seed.
    """
    return method_class(config.name)(config, backbone, seed)
