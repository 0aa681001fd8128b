"""The text of a SuperNode's `--node-config`."""

from __future__ import annotations

from collections.abc import Mapping

from blend_core.errors import ConfigError
from client.site import Scalar


def node_config(values: Mapping[str, Scalar]) -> str:
    """Pairs for `--node-config`, e.g. `client-name='a' partition-id=0`.

    Raises:
        ConfigError: a text cannot be quoted.
    """
    return " ".join(f"{key}={_literal(value)}" for key, value in values.items())


def quoted(text: str) -> str:
    """A value in the single quotes that Flower's node config understands; they have no escapes.

    Raises:
        ConfigError: the text holds a single quote or a control character.
    """
    if "'" in text or not text.isprintable():
        raise ConfigError(
            f"{text!r}: Flower cannot be given a path with a single quote or a control character; "
            "use another folder"
        )
    return f"'{text}'"


def _literal(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else str(value)
