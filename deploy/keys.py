"""`blend keys`: the certificates and keys of a federation over several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blend_core.errors import ConfigError, described
from blend_core.names import checked_name
from deploy.options import split_address

# `cryptography` is imported where it is used: --help must be quick.

keys = typer.Typer(
    name="keys",
    help="Make certificates and keys of a federation over several machines.",
    no_args_is_help=True,
)

PORT = 9300
# Half of what a CA is good for; see `deploy.certificates.CA_DAYS`.
MAX_DAYS = 1825

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder of keys.")]
Days = Annotated[
    int,
    typer.Option(min=1, max=MAX_DAYS, help="Days that the SuperLink's certificate is valid."),
]

SUPERLINK_README = """\
This folder is for the server. server.key must be readable by the SuperLink's user alone.

Start the SuperLink in this folder:

flower-superlink --host 0.0.0.0 --port {port} --database state.db \\
  --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
  --enable-supernode-auth --disable-runtime-dependency-installation

BLEND's docs/deployment.md tells the rest: who may reach the port, registering sites, runs.
"""

SITE_README = """\
This folder makes {name} a site of a federation. node.key is its password: whoever has the file
can take part as {name}. Keep it to the user that runs the site (chmod 600), and tell the
server's operator at once when it may have been copied.

1. Write into site.yaml where your images and the site's private state are.
2. Are the images fit?     blend data check DATA_DIR
3. Start the site:         blend site start .

It connects to {superlink} by TLS, encrypted, and only to a server whose certificate the
federation's CA (ca.crt) has signed. The same without the blend command, in this folder:

flower-supernode --superlink {superlink} --root-certificates ca.crt \\
  --auth-supernode-private-key node.key \\
  --node-config "client-name='{name}' data-dir='/data/photos' state-dir='/var/lib/blend'"
"""

SITE_SETTINGS = """\
# What `blend site start` tells the SuperNode: the server's address, then node config.
superlink: "{superlink}"
client-name: "{name}"
# Your images: train/<class>/*.jpg, and if you have them test/ and novel/.
data-dir: /data/photos
# Private model state. It must survive restarts, and a backup of it is worth having.
state-dir: /var/lib/blend
# Of this machine's second site, any port that is free; the first uses 9094.
# port: 9095
# What a server may ask of this site; see docs/sites.md.
# policy: /etc/blend/policy.yaml
"""


@keys.command()
def create_federation(
    folder: Folder,
    host: Annotated[
        list[str],
        typer.Option(
            help="DNS name or IP address under which sites reach the SuperLink; may be repeated."
        ),
    ],
    days: Days = 730,
) -> None:
    """Make a CA and the SuperLink's certificate in a new folder.

    DIR/superlink is for the server. DIR/ca can make further certificates: keep it elsewhere.
    """
    from deploy import certificates

    folder = folder.absolute()
    readme = SUPERLINK_README.format(port=PORT)
    certificates.create_federation(folder, host, days, {"README.txt": readme})
    print(f"{folder / 'superlink'}: copy it to the server; its README.txt has the command")
    print(f"{folder / 'ca'}: keep it where nobody else can read it; only `renew` needs it")


@keys.command()
def add_site(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The site's client name.")],
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Where the site finds the SuperLink; none: its first host, port {PORT}.",
        ),
    ] = None,
) -> None:
    """Make a site's key and the folder to hand over to it."""
    from deploy import certificates

    folder = folder.absolute()
    checked_name("NAME", name)
    server = certificates.load_certificate(folder / "superlink" / "server.crt")
    hosts = certificates.host_names(server)
    if not hosts:
        raise ConfigError(
            f"{folder / 'superlink' / 'server.crt'}: names no host; "
            "blend keys renew --host makes one that does"
        )
    first = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    address = superlink or f"{first}:{PORT}"
    host, _ = split_address("--superlink", address)
    if host.lower() not in hosts:
        raise ConfigError(
            f"--superlink {address}: the SuperLink's certificate is for {', '.join(hosts)}; "
            "blend keys renew --host gives it other names"
        )
    texts = {"README.txt": SITE_README, "site.yaml": SITE_SETTINGS}
    filled = {n: text.format(name=name, superlink=address) for n, text in texts.items()}
    site = certificates.add_site(folder, name, filled)
    public = certificates.public_key_file(folder, name)
    print(f"{site}: hand it over to the site by a safe way, then delete it here")
    print(f"register it: flwr supernode register {public} CONNECTION --name {name}")


@keys.command()
def renew(
    folder: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option(help="As in create-federation; none: the names it had; may be repeated."),
    ] = None,
    days: Days = 730,
) -> None:
    """Give the SuperLink a new certificate for its key; sites need nothing new.

    If the key may have been copied, remove DIR/superlink/server.key first: it gets a new one.
    """
    from deploy import certificates

    folder = folder.absolute()
    new = certificates.renew(folder, host or [], days)
    print(f"{folder / 'superlink'}: copy {' and '.join(new)} to the server and restart it")


@keys.command()
def show(folder: Folder) -> None:
    """Show names, expiry and fingerprints of a federation's certificates and keys."""
    import datetime

    from cryptography.hazmat.primitives import hashes

    from deploy import certificates
    from server.identity import fingerprint

    folder = folder.absolute()
    superlink = folder / "superlink"
    authority = certificates.load_certificate(superlink / "ca.crt")
    server = certificates.load_certificate(superlink / "server.crt")
    for title, certificate in (("CA", authority), ("SuperLink", server)):
        end = certificate.not_valid_after_utc
        left = end - datetime.datetime.now(datetime.UTC)
        state = "ENDED" if left.days < 0 else f"{left.days} days left"
        begin = certificate.not_valid_before_utc
        print(f"{title}: valid from {begin:%Y-%m-%d %H:%M} UTC until {end:%Y-%m-%d}, {state}")
        print(f"{title}: SHA256:{certificate.fingerprint(hashes.SHA256()).hex()}")
    print(f"SuperLink: for {', '.join(certificates.host_names(certificate))}")
    if not certificates.is_signed(certificate, authority):
        print("SuperLink: its certificate is not signed by the CA in ca.crt, which sites trust")
    if not certificates.is_pair(folder / "superlink"):
        print("SuperLink: server.key is of another certificate; blend keys renew makes one for it")
    if left < certificates.SOON:
        print("SuperLink: blend keys renew makes its next certificate")
    for path in sorted((folder / "public-keys").glob("*.pub")):
        held = folder / "sites" / path.stem / "node.key"
        where = f"; private key still in {held}" if held.exists() else ""
        try:
            key = fingerprint(path.read_bytes())
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"{path}: {described(error)}; restore it from a backup, or remove it and what "
                f"there is of sites/{path.stem} and make a new key"
            ) from None
        print(f"site {path.stem}: {key}{where}")
