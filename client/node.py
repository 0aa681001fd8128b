"""What a site does with one request: join, train, evaluate. Knows no transport.

Read `Node.train` for one client's round from top to bottom.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from blend_core import __version__
from blend_core.backbone import Backbone, Classes
from blend_core.config import (
    DATASET_KINDS,
    BackboneConfig,
    Experiment,
    Precision,
    parse_experiment,
)
from blend_core.data import ClientData, load_client_data, prompt_template, site_stamp
from blend_core.errors import (
    BlendError,
    ConfigError,
    LostStateError,
    RunError,
    SiteError,
    described,
)
from blend_core.evaluation import Counts, evaluate
from blend_core.messages import Reply, Request, Tensors, failure
from blend_core.methods import build_method, config_class
from blend_core.methods.base import Method, require_finite, restore, snapshot
from blend_core.state import Generations, StateError, tensors_sha256
from blend_core.training import local_update
from blend_core.weights import weights_sha256
from client.ledger import Ledger
from client.policy import site_policy
from client.privacy import outgoing
from client.site import Site

logger = logging.getLogger("blend.node")

# In front of the names of a client's own newest upload, in its generations.
UPLOAD = "upload/"

# How often this process has loaded a backbone; the results prove that it was once.
backbone_loads = 0


class Node:
    """One site of one federation, with its model and images in memory.

    Args:
        site: the client's name and folders.
        federation: names the federation whose private state this is.
    """

    def __init__(self, site: Site, federation: str) -> None:
        self.site = site
        self.generations = Generations(site.folder(federation))
        self.ledger = Ledger(site.folder(federation), federation)
        self._loaded: tuple[str, _Loaded] | None = None

    def handle(self, request: Request) -> Reply:
        """Answer a request; what goes wrong comes back as the reply's error, in one line."""
        answer = {"join": self.join, "train": self.train, "evaluate": self.evaluate}
        try:
            reply = answer[request.kind](request)
        except Exception as error:
            reply = self._failure(request, error)
        try:
            self.ledger.append(request, reply)
        except Exception as error:
            # What cannot be written down does not leave.
            reply = self._failure(request, error)
        return reply

    def _failure(self, request: Request, error: Exception) -> Reply:
        known = isinstance(error, BlendError)
        logger.error("%s: %s", self.site.name, described(error), exc_info=None if known else error)
        told = self.site.for_outside(error)
        reply = failure(request.kind, request.round, self.site.name, told)
        if isinstance(error, LostStateError):
            reply.statistics["state"] = "lost"
        return reply

    def train(self, request: Request) -> Reply:
        """One round of this client."""
        loaded = self._load(request)
        method = loaded.method
        if loaded.train_images == 0:
            raise SiteError("E08 no training images; run as evaluation-only or add images")
        statistics = self._enter_round(request, loaded)
        if request.evaluate:
            statistics |= self._evaluate(loaded, method)
        start = time.time()
        with _enough_memory(loaded.experiment):
            statistics["training"] = local_update(
                method,
                loaded.data,
                loaded.base,
                loaded.experiment.train,
                loaded.experiment.seed,
                self.site.name,
                request.round,
                loaded.experiment.rounds,
            )
        statistics["train_span"] = [start, time.time()]
        private, shared = snapshot(method.private()), snapshot(method.shared())
        kept = {f"{UPLOAD}{n}": v for n, v in shared.items()} if method.keeps_uploads else {}
        # Durable before the reply: the server may commit the round as soon as it hears of it.
        self.generations.save(request.round, {**private, **kept}, loaded.state_header)
        statistics["private_sha256"] = tensors_sha256(private)
        # Also on a round that is done again: the same noise, drawn from the site's own key.
        sent = outgoing(
            shared, request.shared, loaded.experiment, self.generations.folder, self.site.name
        )
        return self._reply(request, loaded, statistics, sent)

    def evaluate(self, request: Request) -> Reply:
        """Evaluate the newest shared part with this client's own private part."""
        loaded = self._load(request)
        statistics = self._enter_round(request, loaded)
        statistics |= self._evaluate(loaded, loaded.method)
        statistics["private_sha256"] = tensors_sha256(snapshot(loaded.method.private()))
        return self._reply(request, loaded, statistics)

    def join(self, request: Request) -> Reply:
        """Load everything, say how many images there are and how zero-shot CLIP does on them."""
        loaded = self._load(request)
        statistics = self._evaluate(loaded, loaded.zero_shot)
        statistics["backbone_sha256"] = loaded.state_header["backbone"]
        if origin := loaded.data.origin:
            statistics["data"] = dataclasses.asdict(origin)
        return self._reply(request, loaded, statistics)

    def _enter_round(self, request: Request, loaded: _Loaded) -> dict[str, Any]:
        """Put the received shared part and this client's newest private part into the model.

        Returns:
            What the server must know of it: a cold start, or nothing.
        """
        _require_round(request, loaded.experiment.rounds)
        newest, state = self._state(request, loaded)
        upload = {n.removeprefix(UPLOAD): v for n, v in state.items() if n.startswith(UPLOAD)}
        restore(loaded.method.shared(), request.shared)
        restore(
            loaded.method.private(), {n: v for n, v in state.items() if not n.startswith(UPLOAD)}
        )
        require_finite(request.payload)
        loaded.method.begin(request.payload, upload)
        if newest >= request.last_round:
            return {}
        logger.warning(
            "%s: cold start in round %d: the private state of round %d is lost, that of round %d "
            "is used",
            self.site.name,
            request.round,
            request.last_round,
            newest,
        )
        return {"cold_start": {"lost": request.last_round, "used": newest}}

    def _state(self, request: Request, loaded: _Loaded) -> tuple[int, Tensors]:
        """The newest generation before this round: private tensors and, if kept, the upload.

        Returns:
            Its round (0: none, the initial values) and the tensors. The round is below the last
            one that counted only if the experiment allows cold starts.

        Raises:
            LostStateError: they are damaged or missing.
            SiteError: they were made by another method.
        """
        cold = loaded.experiment.state.on_missing == "cold-start"
        try:
            found = self.generations.newest_before(request.round)
        except StateError as error:
            if not cold:
                raise LostStateError(str(error)) from None
            found = (
                None
                if error.intact is None
                else (error.intact, *self.generations.load(error.intact))
            )
        newest = found[0] if found else 0
        if newest < request.last_round and not cold:
            raise LostStateError(
                f"private state of round {request.last_round} is missing in "
                f"{self.generations.folder} (newest: {newest or 'none'}); restore the folder from "
                "a backup, or resume with state.on_missing=cold-start"
            )
        if found is None:
            return 0, loaded.initial_private
        _, tensors, header = found
        made_by = loaded.state_header
        other = [key for key, value in made_by.items() if header.get(key) != value]
        if other:
            raise SiteError(
                f"the private state in {self.generations.folder} was made with "
                f"another {' and '.join(other)}; start a new federation"
            )
        return newest, tensors

    def _evaluate(self, loaded: _Loaded, method: Method) -> dict[str, Any]:
        start = time.time()
        own = method is loaded.method
        base, new = (loaded.base, loaded.new) if own else loaded.classes(method)
        counts: Counts = evaluate(
            method, loaded.data, base, new, loaded.experiment.evaluation.batch_size
        )
        return {"counts": counts, "evaluate_span": [start, time.time()]}

    def _reply(
        self,
        request: Request,
        loaded: _Loaded,
        statistics: dict[str, Any],
        shared: Tensors | None = None,
    ) -> Reply:
        worker = {"pid": os.getpid(), "backbone_loads": backbone_loads}
        return Reply(
            kind=request.kind,
            round=request.round,
            client=self.site.name,
            version=__version__,
            train_images=loaded.train_images,
            statistics={**statistics, "worker": worker},
            shared=shared or {},
        )

    def _load(self, request: Request) -> _Loaded:
        """Backbone, images, prompts and method of the experiment; once per experiment."""
        policy = site_policy(self.site)
        key = json.dumps(request.experiment, sort_keys=True)
        if self._loaded is None or self._loaded[0] != key:
            experiment = parse_experiment(request.experiment)
            policy.require(experiment, self.site)  # Before anything is opened that it names.
            self._loaded = (key, _Loaded(experiment, self.site))
        else:
            policy.require(self._loaded[1].experiment, self.site)
            self._loaded[1].refresh()
        loaded = self._loaded[1]
        policy.require_loaded(loaded.state_header["backbone"], loaded.train_images)
        # The number of threads changes the order of sums, so nobody's environment decides it.
        torch.set_num_threads(loaded.experiment.train.threads)
        return loaded


class _Loaded:
    """What a node keeps in memory between messages."""

    def __init__(self, experiment: Experiment, site: Site) -> None:
        self.experiment = experiment
        self._site = site
        torch.set_num_threads(experiment.train.threads)
        self.backbone = _backbone(
            experiment.backbone.model_dump_json(), _device(experiment), experiment.train.precision
        )
        self.method = build_method(experiment.method, self.backbone, experiment.seed)
        zero_shot = config_class("zero-shot")(name="zero-shot")
        self.zero_shot = build_method(zero_shot, self.backbone, experiment.seed)
        self._stamp: str | None = None
        self.refresh()
        self.initial_private = snapshot(self.method.private())
        settings = experiment.method.model_dump_json().encode()
        # What a private state belongs to; see `Node._state`.
        self.state_header = {
            "method": experiment.method.name,
            "settings of the method": hashlib.sha256(settings).hexdigest(),
            "backbone": _backbone_sha256(self.backbone),
        }

    def refresh(self) -> None:
        """Read the images and class names, again if the site's folder has changed since.

        Raises:
            SiteError: the folder is unusable.
        """
        experiment, site = self.experiment, self._site
        stamp = ""
        if experiment.data.kind == "folders" and site.data_dir is not None:
            stamp = site_stamp(site.data_dir, site.folder_options(experiment).holdout_file)
        if stamp == self._stamp:
            return
        memory = experiment.data.image_memory if site.image_memory is None else site.image_memory
        try:
            self.data: ClientData = load_client_data(
                experiment,
                site.name,
                site.partition,
                site.data_dir,
                site.folder_options(experiment),
                self.backbone.preprocess,
                memory,
            )
        except ConfigError as error:
            # A server's settings may name files of this machine; what is wrong with them is, at a
            # site with a place of its own, for the site's log alone.
            if experiment.data.kind not in DATASET_KINDS or site.data_dir is None:
                raise
            raise SiteError(str(error)) from None
        self.base, self.new = self.classes(self.method)
        self.method.observe(self.data, self.base)
        self._stamp = stamp

    @property
    def train_images(self) -> int:
        """Number of training images."""
        return len(self.data.train)

    def classes(self, method: Method) -> tuple[Classes, Classes | None]:
        """The method's constants of the base and the new classes.

        Raises:
            SiteError: a class name is too long.
        """
        template = self._site.prompt_template or prompt_template(self.experiment)
        new = self.data.new_names
        try:
            base = method.tokenize(self.data.base_names, template)
            return base, method.tokenize(new, template) if new else None
        except ConfigError as error:  # The names are the site's, not the server's.
            raise SiteError(f"E11 {error}") from None


@contextmanager
def _enough_memory(experiment: Experiment) -> Iterator[None]:
    """Turn every way in which memory runs out into one line that says what to set.

    Raises:
        RunError: memory ran out. The round can be done again.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has an error of its own for GPUs, and none for processors.
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "allocate memory" not in str(error):
            raise
        raise RunError(
            f"out of memory in training; set train.batch_size below "
            f"{experiment.train.batch_size}, train.precision=bf16 or a smaller backbone.text_chunk"
        ) from error


def _require_round(request: Request, rounds: int) -> None:
    """Refuse a round that no run has: it would put the site's generations out of order.

    Raises:
        RunError: it is below 1, past the end, or not after the client's last accepted one.
    """
    last = rounds if request.kind == "train" else rounds + 1
    if not max(1, request.last_round + 1) <= request.round <= last:
        raise RunError(
            f"the server asked to {request.kind} in round {request.round}; expected "
            f"{max(1, request.last_round + 1)} to {last}"
        )


def _device(experiment: Experiment) -> str:
    device = experiment.train.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device = {device!r}: no CUDA device here; use cpu or auto")
    return device


@lru_cache(maxsize=1)
def _backbone(config: str, device: str, precision: Precision) -> Backbone:
    """The backbone, shared by all clients of this process (they never change it)."""
    global backbone_loads

    backbone_loads += 1
    return Backbone.load(BackboneConfig.model_validate_json(config), device, precision)


@lru_cache(maxsize=1)
def _backbone_sha256(backbone: Backbone) -> str:
    return weights_sha256(backbone.model)
