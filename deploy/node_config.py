"""The text of a SuperNode's `--node-config`."""

from __future__ import annotations

from collections.abc import Mapping

from blend_core.errors import ConfigError
from client.site import Scalar


def node_config(values: Mapping[str, Scalar]) -> str:
    """Pairs for `--node-config`, e.g. `client-name='a' partition-id=0`.

    Raises:
        ConfigError: a text holds a single quote or a control character.
    """
    return " ".join(f"{key}={_literal(key, value)}" for key, value in values.items())


def _literal(key: str, value: Scalar) -> str:
    """A value as Flower's node config understands it: texts in single quotes, without escapes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    if "'" in value or not value.isprintable():
        raise ConfigError(
            f"{key} = {value!r}: must have no single quote and no control character, which "
            "Flower's node config cannot hold"
        )
    return f"'{value}'"
