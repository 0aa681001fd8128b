"""Which SuperNode key each client name belongs to.

Flower 1.42 tells a ServerApp of every node its public key and, if its key was registered with
`flwr supernode register KEY --name NAME`, that name. A SuperNode that registers itself (a
SuperLink without --enable-supernode-auth) makes a new key at every start and can give no name. So
a name in Flower's node information is the mark of a key that an operator has let in, and only
such keys are bound: on one machine, without keys, a restarted SuperNode must get its name back.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Protocol

from blend_core.errors import ConfigError, described
from blend_core.state import StateError, make_folder, write_json_atomic

IDENTITIES = "identities.json"


class Node(Protocol):
    """What we use of Flower's `NodeInfo`."""

    node_id: int
    name: str
    public_key: bytes
    last_activated_at: str


class Identities:
    """The bindings of one run's folder, `identities.json`: client name -> key's fingerprint.

    Args:
        folder: of the run.
        required: refuse nodes whose key is not registered with a name.

    Raises:
        StateError: there is a file, but it is damaged.
    """

    def __init__(self, folder: Path, required: bool) -> None:
        self.path = folder / IDENTITIES
        self.required = required
        self.keys = _read(self.path)
        # Clients whose nodes' keys have no name, until somebody was told of them.
        self._nameless: set[str] = set()

    def stranger(self, node: Node) -> str | None:
        """Why a node is not even asked to join; None if it may be."""
        if self.required and not node.name:
            return (
                "server.require_keys: its key is not registered by name; on the server: "
                "flwr supernode register KEY.pub CONNECTION --name CLIENT"
            )
        return None

    def refusal(self, client: str, node: Node) -> str | None:
        """Why a node may not speak for a client; None if it may."""
        bound = self.keys.get(client)
        if not node.name:
            return bound and f"the name belongs to the registered key {bound}; this node has none"
        if node.name != client:
            return f"its key is registered for {node.name}"
        key = fingerprint(node.public_key)
        if bound not in (None, key):
            return (
                f"its key is {key}, but the name belongs to {bound}; if the site was given a new "
                f"key, remove the name from {self.path}"
            )
        return None

    def bind(self, client: str, node: Node) -> None:
        """Keep, durably, that a name belongs to a registered node's key from now on.

        Raises:
            StateError: the file cannot be written.
        """
        if not node.name:
            self._nameless.add(client)
        if node.name and client not in self.keys:
            self.keys[client] = fingerprint(node.public_key)
            make_folder(self.path.parent)
            write_json_atomic(self.path, self.keys)

    def doubt(self) -> str | None:
        """What to tell, once, if only some keys are registered by name; None if nothing."""
        if not self.keys or not self._nameless:
            return None
        clients = ", ".join(sorted(self._nameless))
        self._nameless.clear()
        return (
            f"{clients}: the key is not registered by name as those of others are, so anybody "
            "without a name could have claimed to be this client; server.require_keys=true "
            "refuses such keys"
        )


def fingerprint(public_key: bytes) -> str:
    """A public key's fingerprint as `ssh-keygen -lf` prints it: SHA256: and 43 of base64.

    Args:
        public_key: in PEM, as Flower has it, or a line of OpenSSH, as in a `.pub` file.

    Raises:
        ConfigError: it is no public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = public_key.startswith(b"-----")
    load = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
    try:
        key = load(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("no EC key")
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"not a public key: {described(error)}") from None
    digest = serialization.ssh_key_fingerprint(key, hashes.SHA256())
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _read(path: Path) -> dict[str, str]:
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
            raise ValueError("not names and fingerprints")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path}: cannot be read: {described(error)}; restore it, or remove it to bind names "
            "to keys anew"
        ) from None
    return keys
