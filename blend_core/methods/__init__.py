"""One module per method; the registry that finds them by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from blend_core.config import MethodConfig
from blend_core.errors import BlendError, ConfigError, described, one_line

if TYPE_CHECKING:
    from blend_core.backbone import Backbone
    from blend_core.methods.base import Method

# Methods of other packages are entry points of this group, written the same way.
GROUP = "blend.methods"

_METHODS = {
    "adaptformer": "blend_core.methods.adaptformer:AdaptFormer",
    "blend": "blend_core.methods.blend:Blend",
    "clip-adapter": "blend_core.methods.clip_adapter:ClipAdapter",
    "clip-lora": "blend_core.methods.clip_lora:ClipLora",
    "fedotp": "blend_core.methods.fedotp:FedOTP",
    "fedpgp": "blend_core.methods.fedpgp:FedPGP",
    "fedpha": "blend_core.methods.fedpha:FedPHA",
    "mma-fedavg": "blend_core.methods.mma:MmaFedAvg",
    "pfedmma": "blend_core.methods.mma:PFedMMA",
    "pfedmoap": "blend_core.methods.pfedmoap:PFedMoAP",
    "pfedprompt": "blend_core.methods.pfedprompt:PFedPrompt",
    "promptfl": "blend_core.methods.promptfl:PromptFL",
    "zero-shot": "blend_core.methods.zero_shot:ZeroShot",
}


# What comes with the package.
BUILT_IN = tuple(sorted(_METHODS))


@cache
def _known() -> dict[str, str]:
    """Name -> "module:class" of our methods and of those in other packages; ours win."""
    return {found.name: found.value for found in entry_points(group=GROUP)} | _METHODS


def method_names() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(_known())


def method_class(name: str) -> type[Method]:
    """The class of a method by its name.

    Raises:
        ConfigError: no such method, or a method of another package that cannot be imported.
    """
    if name not in _known():
        raise ConfigError(f"method.name = {name!r}: unknown; known: {', '.join(method_names())}")
    where = _known()[name]
    module, _, attribute = where.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # Another package's import may do anything.
        raise ConfigError(
            f"method.name = {name!r}: {where} cannot be imported: {one_line(described(error))}"
        ) from error
    from blend_core.methods.base import Method

    config = getattr(found, "Config", None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"method.name = {name!r}: {where} is not a class derived from Method")
    if not (isinstance(config, type) and issubclass(config, MethodConfig)):
        raise ConfigError(
            f"method.name = {name!r}: {where} has no Config derived from MethodConfig"
        )
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

    Raises:
        ConfigError: the backbone cannot carry the method, or the method's two sets are not what
            they must be; one line that says why.
    """
    from blend_core.methods.base import require_sets

    try:
        method = method_class(config.name)(config, backbone, seed)
        require_sets(method)
    except BlendError:
        raise
    except Exception as error:
        raise ConfigError(
            f"method.name = {config.name!r}: cannot be built: {one_line(described(error))}"
        ) from error
    # The weights may lie on another device; without weights (meta) there is nothing to follow.
    return method.to(backbone.device if backbone.device.type != "meta" else "cpu")
