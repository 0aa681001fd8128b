"""What needs torch: the configuration, the device, the backbone, room for its states, images."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blend_core.errors import BlendError, ConfigError, one_line
from deploy.checks import CONFIGURATION, SITE, Check, Settings, begins, failure, ok, warning
from deploy.checks.machine import GIB, existing, size

if TYPE_CHECKING:
    from blend_core.config import Experiment
    from blend_core.data.findings import Finding
    from blend_core.data.folders import FolderOptions

# Lines of `site.yaml` that are no node config.
OF_START = ("superlink", "port")
# Findings of one site that are shown.
SHOWN = 2


def model(settings: Settings) -> Iterator[Check]:
    """Each check builds on the one before; the first failure of a kind that matters ends it."""
    again = "install again, best into a new environment: pip install ."
    yield begins("torch", "loading torch", "", CONFIGURATION)
    try:
        yield _torch()
    except Exception as error:  # A broken installation fails in many ways.
        yield failure(
            "torch", one_line(f"{type(error).__name__}: {error}", 300), again, CONFIGURATION
        )
        return
    yield begins("configuration", "reading the configuration", "", CONFIGURATION)
    from blend_core.settings import load_experiment
    from deploy.check import check

    try:
        experiment = load_experiment(settings.config, settings.overrides)
    except ConfigError as error:
        yield failure("configuration", str(error), "correct this setting", CONFIGURATION)
        return
    advice = "is data.root on a network drive that hangs?"
    yield begins("configuration", "putting settings and data together", advice, CONFIGURATION)
    fits = True
    try:
        check(experiment)
    except BlendError as error:
        fits = False
        name = "data" if error.exit_code == SITE else "configuration"
        advice = "docs/data.md shows what belongs where" if name == "data" else "correct it"
        yield failure(name, str(error), advice, error.exit_code)
    if fits:
        name = settings.config or "quickstart"
        yield ok("configuration", f"{name}: {experiment.method.name}, {experiment.clients} clients")
    yield _device(experiment)
    yield begins(
        "backbone",
        f"loading {experiment.backbone.name}",
        "is the file on a network drive? copy it; or give --timeout more seconds",
        CONFIGURATION,
    )
    yield _backbone(experiment)
    if fits:
        yield from _room(experiment, settings)
        yield from _data(experiment)
    if settings.site is not None:
        yield from _site_images(experiment, Path(settings.site))


def _torch() -> Check:
    import open_clip
    import torch
    import torchvision

    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if float(product.sum()) != 512.0:
        raise RuntimeError("8 x 8 ones times 8 x 8 ones do not sum to 512")
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    return ok("torch", f"{versions}, open_clip {open_clip.__version__} load; {build}")


def _device(experiment: Experiment) -> Check:
    """The device of the configuration works, and how much memory it has."""
    import torch

    from blend_core.device import device_here

    try:
        device = device_here(experiment.train.device)
    except ConfigError as error:
        found, _, advice = str(error).partition("; ")
        return failure("device", found, advice, CONFIGURATION)
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        more = f"; {count} CUDA devices are not used (train.device=auto)" if count else ""
        return ok("device", f"cpu, {cores} cores{more}")
    try:
        torch.ones(8, 8, device=device).matmul(torch.ones(8, 8, device=device)).sum().item()
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        found = one_line(f"{device} does not work: {error}", 300)
        advice = "check nvidia-smi; is the driver older than torch's CUDA?"
        return failure("device", found, advice, CONFIGURATION)
    found = f"{device} {torch.cuda.get_device_name(device)}, {size(free)} of {size(total)} free"
    if free < 2 * GIB:
        return warning("device", found, "end what else uses it, or train on another one")
    return ok("device", found)


def _backbone(experiment: Experiment) -> Check:
    """Load it as a site does, but without a network (the environment sees to that)."""
    from open_clip.transformer import QuickGELU

    from blend_core.backbone import Backbone

    config = experiment.backbone
    try:
        backbone = Backbone.load(config)
    except ConfigError as error:
        advice = "runs without a network need the file; docs: backbone.weights in README.md"
        return failure("backbone", str(error), advice, CONFIGURATION)
    quick = any(isinstance(module, QuickGELU) for module in backbone.model.modules())
    count = sum(p.numel() for p in backbone.model.parameters())
    return ok(
        "backbone",
        f"{config.name} from {config.weights} loads offline: {count / 1e6:.1f} M weights, "
        f"{'QuickGELU' if quick else 'GELU'}",
    )


def _room(experiment: Experiment, settings: Settings) -> Iterator[Check]:
    """Room for checkpoints and private states, of a run on this machine and of one site."""
    server, site = state_bytes(experiment)
    runs = Path("runs").absolute()
    yield _space("room for a run", runs, server + site * experiment.clients)
    if settings.state_dir is not None:
        folder = Path(settings.state_dir).expanduser().absolute()
        yield _space("room for a site's state", folder, site)


def state_bytes(experiment: Experiment) -> tuple[int, int]:
    """Bytes of all checkpoints of a server, and of all generations of one site; float32."""
    from blend_core.backbone import Backbone
    from blend_core.methods import build_method

    method = build_method(
        experiment.method, Backbone.describe(experiment.backbone), experiment.seed
    )
    counts = method.parameter_counts()
    kept = method.keeps_uploads or experiment.server.aggregate_stale
    shared = counts["shared"] * (1 + experiment.clients * kept)
    private = counts["private"] + counts["shared"] * method.keeps_uploads
    rounds = experiment.server.keep_checkpoints
    # One more than is kept, for the newest is written before the oldest goes. A site keeps one
    # more than the server, and as many that a resumed run has abandoned.
    return 4 * shared * (rounds + 1), 4 * private * (2 * (rounds + 1) + 1)


def _space(name: str, folder: Path, needed: int) -> Check:
    there = existing(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        return failure(name, f"{there}: cannot be written", "run where you may write", SITE)
    free = shutil.disk_usage(there).free
    found = f"{there}: {size(free)} free, {size(needed)} needed for states"
    if free < needed:
        return failure(name, found, "make room, or lower server.keep_checkpoints", SITE)
    if free < needed + GIB:
        return warning(name, found, "make room: logs and results come on top")
    return ok(name, found)


def _data(experiment: Experiment) -> Iterator[Check]:
    """The images; sites' own folders as `blend data check` does."""
    data = experiment.data
    if data.kind == "shapes":
        yield ok("data", "shapes are rendered here")
    elif data.kind != "folders":
        yield ok("data", f"{data.kind}: all files are there below {data.root}")
    elif data.root is not None:
        from blend_core.data.folders import FolderOptions
        from blend_core.data.site_images import is_site

        options = FolderOptions(
            data.label_space,
            tuple(data.classes),
            data.template,
            data.holdout,
            skip_bad=data.skip_bad,
        )
        for folder in sorted(p for p in Path(data.root).iterdir() if is_site(p)):
            yield from _folder(folder, options)


def _site_images(experiment: Experiment, folder: Path) -> Iterator[Check]:
    """The images of the site whose folder this is, read as the site reads them."""
    from client.site import Site
    from deploy.site_start import read_settings

    try:
        values = read_settings(folder)
        site = Site.from_node_config({k: v for k, v in values.items() if k not in OF_START})
    except ConfigError as error:
        yield failure("site.yaml", str(error), "correct it", CONFIGURATION)
        return
    if site.data_dir is not None:
        # Which images are held out is for the site itself to write down.
        options = replace(site.folder_options(experiment), holdout_file=None)
        yield from _folder(site.data_dir, options)


def _folder(folder: Path, options: FolderOptions) -> Iterator[Check]:
    from blend_core.data.folders import examine

    name, advice = f"data {folder.name}", f"blend data check {folder} says all"
    yield begins(name, f"reading {folder}", advice, 0)
    found = examine(folder, options)
    if found.errors:
        yield failure(name, _first(found.errors), advice, SITE)
    elif found.findings:
        yield warning(name, _first(found.findings), advice)
    else:
        counts = f"{found.train.total():,} training and {found.test.total():,} test images"
        yield ok(name, f"{counts}, {len(found.base_names)} classes")


def _first(findings: Sequence[Finding]) -> str:
    texts = [one_line(str(finding), 200) for finding in findings]
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
