"""Building an open_clip model and filling it with weights, from a tag, a file or the package."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import get_model_config, load_state_dict
from open_clip.model import CLIP
from open_clip.transformer import QuickGELU
from torch import Tensor

from blend_core.config import BackboneConfig
from blend_core.errors import ConfigError
from blend_core.randomness import torch_generator

TINY = "blend-tiny"
# What a TorchScript archive of OpenAI carries besides the weights.
_OPENAI_EXTRAS = ("input_resolution", "context_length", "vocab_size")


def build_model(config: BackboneConfig) -> CLIP:
    """The model without weights, on the meta device, frozen and in eval mode.

    Raises:
        ConfigError: no such model, or one that is not CLIP's own class.
    """
    description = dict(_description(config.name))
    custom = description.pop("custom_text", False) or "multimodal_cfg" in description
    hugging_face = any(key.startswith("hf_") for key in description.get("text_cfg", {}))
    if custom or hugging_face:
        raise ConfigError(
            f"backbone.name = {config.name!r}: only open_clip's own CLIP models are supported, "
            "e.g. ViT-B-16-quickgelu"
        )
    if config.quick_gelu is not None:
        description["quick_gelu"] = config.quick_gelu
    try:
        with torch.device("meta"):
            model = CLIP(**description)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"backbone.name = {config.name!r}: not a usable model description: {error}"
        ) from None
    return model.requires_grad_(False).eval()


def load_weights(model: CLIP, config: BackboneConfig) -> None:
    """Fill a model made by `build_model` with float32 weights.

    Raises:
        ConfigError: no such tag or file, keys or shapes of another model, OpenAI weights in a
            model without QuickGELU.
    """
    path, from_openai = _locate(config)
    state, script = _read(path)
    from_openai = from_openai or script or any(key in state for key in _OPENAI_EXTRAS)
    state = {key: value for key, value in state.items() if key not in _OPENAI_EXTRAS}
    quick = any(isinstance(module, QuickGELU) for module in model.modules())
    chosen = config.quick_gelu is False and not from_openai
    if not quick and not chosen and (from_openai or _half_precision_values(state)):
        raise ConfigError(
            f"backbone.name = {config.name!r} with weights {config.weights!r}: OpenAI weights "
            f"need QuickGELU and this model has GELU; use {config.name}-quickgelu or "
            "backbone.quick_gelu=true (for other weights stored in half precision: "
            "backbone.quick_gelu=false)"
        )
    filled = {key: _float(value) for key, value in state.items()}
    if config.weights == "builtin":
        _fill_unused_tokens(filled["token_embedding.weight"])
    try:
        model.load_state_dict(filled, strict=True, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"backbone.weights = {config.weights!r} does not fit {config.name}: {detail}"
        ) from None
    # The one buffer that is not stored, so it is still on the meta device.
    length = int(model.context_length)
    model.attn_mask = torch.full((length, length), float("-inf")).triu_(1)
    model.requires_grad_(False)


def preprocess_settings(config: BackboneConfig, model: CLIP) -> dict[str, Any]:
    """Image size, mean, std and interpolation that the weights were trained with."""
    settings = dict(open_clip.get_pretrained_cfg(config.name, config.weights) or {})
    height, width = model.visual.image_size if _pair(model) else (model.visual.image_size,) * 2
    if height != width:
        raise ConfigError(
            f"backbone.name = {config.name!r}: images of {height}x{width} pixels; "
            "only square ones are supported"
        )
    return {
        "size": int(height),
        "mean": tuple(settings.get("mean") or open_clip.OPENAI_DATASET_MEAN),
        "std": tuple(settings.get("std") or open_clip.OPENAI_DATASET_STD),
        "interpolation": settings.get("interpolation") or "bicubic",
    }


def weights_sha256(model: CLIP) -> str:
    """SHA-256 over the frozen weights in sorted name order; tells one backbone from another."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        # As bytes, because NumPy knows no bfloat16.
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _pair(model: CLIP) -> bool:
    return isinstance(model.visual.image_size, tuple | list)


def _description(name: str) -> dict[str, Any]:
    """open_clip's description of a model: built in here, a .json file, or known by name."""
    if name == TINY:
        text = (resources.files("blend_core") / "assets" / f"{TINY}.json").read_text()
        return _json(text, name)
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"backbone.name = {name!r}: no such model description")
        return _json(path.read_text(encoding="utf-8"), name)
    found = get_model_config(name)
    if found is None:
        raise ConfigError(
            f"backbone.name = {name!r}: unknown to open_clip; e.g. ViT-B-16-quickgelu, or "
            f"{TINY} for the built-in one"
        )
    description: dict[str, Any] = found
    return description


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"backbone.name = {name!r}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"backbone.name = {name!r}: expected a JSON object")
    model: dict[str, Any] = value.get("model_cfg", value)
    return model


def require_source(config: BackboneConfig) -> None:
    """Check that the weights are the built-in ones, a file here or a tag; downloads nothing.

    Raises:
        ConfigError: they are none of these; says what could be meant.
    """
    name, weights = config.name, config.weights
    if weights == "builtin" and name != TINY:
        raise ConfigError(
            f"backbone.weights = 'builtin' belongs to {TINY}; for {name} give a tag such as openai "
            "or a local file"
        )
    if weights == "builtin" or Path(weights).is_file():
        return
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights not in tags:
        known = f"its tags: {', '.join(tags)}" if tags else "it has no tags"
        known = "use backbone.weights=builtin" if name == TINY else known
        raise ConfigError(
            f"backbone.weights = {weights!r}: no such file, and not a tag of {name} ({known})"
        )


def _locate(config: BackboneConfig) -> tuple[Path, bool]:
    """The weight file and whether it is known to be OpenAI's."""
    require_source(config)
    weights = config.weights
    if weights == "builtin":
        return Path(str(resources.files("blend_core") / "assets" / f"{TINY}.safetensors")), False
    if Path(weights).is_file():
        return Path(weights), False
    settings = open_clip.get_pretrained_cfg(config.name, weights)
    try:
        path = open_clip.download_pretrained(settings, prefer_hf_hub=True)
    except Exception as error:
        raise ConfigError(
            f"backbone.weights = {weights!r} of {config.name} could not be downloaded "
            f"({type(error).__name__}); fetch the file on a machine with a network and give its "
            "path as backbone.weights"
        ) from None
    return Path(path), bool(settings.get("quick_gelu"))


def _read(path: Path) -> tuple[dict[str, Tensor], bool]:
    """(state dict, whether the file is a TorchScript archive). Never unpickles objects."""
    try:
        if path.suffix == ".safetensors":
            return load_state_dict(str(path)), False
        with path.open("rb") as file:
            script = file.read(4) == b"PK\x03\x04" and _is_script(path)
        if script:
            return dict(torch.jit.load(str(path), map_location="cpu").state_dict()), True
        return load_state_dict(str(path), weights_only=True), False
    except Exception as error:
        detail = " ".join(str(error).split())[:200]
        raise ConfigError(f"backbone.weights = {str(path)!r} cannot be read: {detail}") from None


def _is_script(path: Path) -> bool:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return any(Path(name).name == "constants.pkl" for name in archive.namelist())


def _float(value: Tensor) -> Tensor:
    """A float32 copy in memory of its own (safetensors maps the file)."""
    return value.to(torch.float32, copy=True) if value.is_floating_point() else value.clone()


def _fill_unused_tokens(table: Tensor) -> None:
    """Give the tokens that the tiny CLIP never saw an embedding of their own, in place.

    Their rows are stored as zeros, which made all unknown class names the same to the model: a
    site with such names could not learn. Now they differ, by chance, with the spread of the
    known ones, always the same.
    """
    unused = (table == 0).all(dim=1)
    spread = float(table[~unused].std())
    shape = (int(unused.sum()), table.shape[1])
    table[unused] = torch.randn(shape, generator=torch_generator(0, "unused tokens")) * spread


def _half_precision_values(state: dict[str, Tensor]) -> bool:
    """Whether every attention weight is exactly a half-precision number.

    OpenAI released half-precision weights, so a converted copy (float32 state dict,
    safetensors) is still recognised by its values; weights trained in float32 are not.
    """
    weights = [v for k, v in state.items() if k.endswith("attn.in_proj_weight")]
    return bool(weights) and all(torch.equal(w.float(), w.half().float()) for w in weights)
