"""What commands read from their options."""

from __future__ import annotations

import pytest

from blend_core.errors import ConfigError
from deploy.options import split_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fl.example.org:9300", ("fl.example.org", 9300)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("[0:0:0:0:0:0:0:1]:9300", ("::1", 9300)),
    ],
)
def test_an_address_is_a_host_and_a_port(text, expected):
    assert split_address("--superlink", text) == expected


@pytest.mark.parametrize("host", ["a..b", ".localhost", "a" * 70, f"{'a' * 64}.org"])
def test_a_name_that_no_host_can_have_is_named(host):
    with pytest.raises(ConfigError, match=r"^--superlink: .*: no host has this name"):
        split_address("--superlink", f"{host}:9300")


@pytest.mark.parametrize(
    "text",
    ["a", "a:", ":1", "a:0", "a:99999", "a:65536", "a:9x", "http://a:1", "::1", "fe80::1:9300",
     "a b:1", "a:\u0661", "", 9300, None, ["a:1"]],
)  # fmt: skip
def test_what_is_no_address_is_named(text):
    with pytest.raises(ConfigError, match=r"^--superlink: .*: must be HOST:PORT, e\.g\. "):
        split_address("--superlink", text)
