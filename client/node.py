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
from blend_core.data import (
    ClientData,
    file_stamp,
    load_client_data,
    prompt_template,
    site_stamp,
)
from blend_core.device import device_here
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
# In the header of a generation: that its round started from another state than the last one.
COLD = "cold_start"

# What PyTorch's general errors say when memory runs out: of the machine, of a GPU at its start.
OUT_OF_MEMORY = ("allocate memory", "CUDA error: out of memory")
# What to do where model and images do not fit.
ROOM = (
    "set data.image_memory (of this site alone: image-memory) to fewer GiB, or choose a smaller "
    "backbone"
)

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
        train = loaded.experiment.train
        less = f"train.batch_size below {train.batch_size}, train.precision=bf16 or a smaller "
        with _enough_memory("training", f"set {less}backbone.text_chunk"):
            statistics["training"] = local_update(
                method,
                loaded.data,
                loaded.base,
                train,
                loaded.experiment.seed,
                self.site.name,
                request.round,
                loaded.experiment.rounds,
            )
        statistics["train_span"] = [start, time.time()]
        private, shared = snapshot(method.private()), snapshot(method.shared())
        kept = {f"{UPLOAD}{n}": v for n, v in shared.items()} if method.keeps_uploads else {}
        # One more than the server may go back to: it may have died before it heard of this round.
        self.generations.keep = loaded.experiment.server.keep_checkpoints + 1
        # Durable before the reply: the server may commit the round as soon as it hears of it.
        header = loaded.state_header
        if cold := statistics.get("cold_start"):
            # Told again until a reply has counted; see `_state`.
            header = {**header, COLD: {**cold, "round": request.round}}
        self.generations.save(request.round, {**private, **kept}, header)
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
        cold, state = self._state(request, loaded)
        upload = {n.removeprefix(UPLOAD): v for n, v in state.items() if n.startswith(UPLOAD)}
        restore(loaded.method.shared(), request.shared)
        restore(
            loaded.method.private(), {n: v for n, v in state.items() if not n.startswith(UPLOAD)}
        )
        require_finite(request.payload)
        loaded.method.begin(request.payload, upload)
        if not cold:
            return {}
        logger.warning(
            "%s: cold start in round %d: the private state of round %d is lost, that of round %d "
            "is used",
            self.site.name,
            request.round,
            cold["lost"],
            cold["used"],
        )
        return {"cold_start": cold}

    def _state(self, request: Request, loaded: _Loaded) -> tuple[dict[str, int], Tensors]:
        """The newest intact generation before this round: private tensors and a kept upload.

        Returns:
            Which round's state is "lost" and which was "used" instead (0: the initial values),
            empty if none is lost; and the tensors. A state that counted may be lost only if the
            experiment allows cold starts; of a round that did not, the server asks for nothing.

        Raises:
            LostStateError: that of the last round that counted is damaged or missing.
            SiteError: they were made by another method.
        """
        damage, cold = "", {}
        try:
            found = self.generations.newest_before(request.round)
        except StateError as error:
            damage, intact = str(error), error.intact
            found = None if intact is None else (intact, *self.generations.load(intact))
            cold = {"lost": error.round or 0, "used": intact or 0}
            logger.warning("%s: %s", self.site.name, damage)
        newest, tensors, header = found or (0, loaded.initial_private, {})
        if newest < request.last_round:
            cold = {"lost": request.last_round, "used": newest}
            damage = damage or (
                f"private state of round {request.last_round} is missing in "
                f"{self.generations.folder} (newest: {newest or 'none'})"
            )
        elif not cold and header.get(COLD, {}).get("round", 0) > request.last_round:
            # A round that started cold, and of which the server has heard nothing that counted.
            cold = {key: header[COLD][key] for key in ("lost", "used")}
            damage = f"private state of round {cold['lost']} was lost in round {newest}"
        fails = loaded.experiment.state.on_missing == "fail"
        if fails and cold and cold["used"] < request.last_round:
            raise LostStateError(
                f"{damage}; restore the folder from a backup, or resume with "
                "state.on_missing=cold-start"
            )
        made_by = loaded.state_header if found else {}
        other = [key for key, value in made_by.items() if header.get(key) != value]
        if other:
            raise SiteError(
                f"the private state in {self.generations.folder} was made with "
                f"another {' and '.join(other)}; start a new federation"
            )
        return cold, tensors

    def _evaluate(self, loaded: _Loaded, method: Method) -> dict[str, Any]:
        start = time.time()
        own = method is loaded.method
        base, new = (loaded.base, loaded.new) if own else loaded.classes(method)
        batch = loaded.experiment.evaluation.batch_size
        remedy = f"set evaluation.batch_size below {batch} or a smaller backbone.text_chunk"
        with _enough_memory("evaluation", remedy):
            counts: Counts = evaluate(method, loaded.data, base, new, batch)
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
            with _enough_memory("loading", ROOM):
                self._loaded = (key, _Loaded(experiment, self.site))
        else:
            policy.require(self._loaded[1].experiment, self.site)
            with _enough_memory("loading", ROOM):
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
            experiment.backbone.model_dump_json(),
            device_here(experiment.train.device),
            experiment.train.precision,
        )
        self.method = build_method(experiment.method, self.backbone, experiment.seed)
        zero_shot = config_class("zero-shot")(name="zero-shot")
        self.zero_shot = build_method(zero_shot, self.backbone, experiment.seed)
        # Of the site's images and of its list of held-out ones, as they were read.
        self._stamp: tuple[str, str] | None = None
        self.refresh()
        self.initial_private = snapshot(self.method.private())
        # Defaults are left out: a version with one setting more goes on with the same state. That
        # a run's settings stay what they were is for its server to see (`server.checkpoints`).
        settings = experiment.method.model_dump_json(exclude_defaults=True).encode()
        # What a private state belongs to; see `Node._state`.
        self.state_header: dict[str, Any] = {
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
        images = ""
        holdout_file = None
        if experiment.data.kind == "folders" and site.data_dir is not None:
            images = site_stamp(site.data_dir)
            holdout_file = site.folder_options(experiment).holdout_file
        held = file_stamp(holdout_file) if holdout_file else ""
        if (images, held) == self._stamp:
            return
        self._stamp = None  # Until all that follows has been read together.
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
        # Images as they were before they were read, lest a later change is missed; the list of
        # held-out ones as it was left by reading them.
        self._stamp = (images, file_stamp(holdout_file) if holdout_file else "")

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
def _enough_memory(work: str, remedy: str) -> Iterator[None]:
    """Turn every way in which memory runs out into one line that says what to set.

    Args:
        work: what is being done.
        remedy: what to do where memory does not suffice for it.

    Raises:
        RunError: memory ran out. The round can be done again.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has an error of its own for GPUs, and none for processors.
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise RunError(f"out of memory in {work}; {remedy}") from error


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


@lru_cache(maxsize=1)
def _backbone(config: str, device: str, precision: Precision) -> Backbone:
    """The backbone, shared by all clients of this process (they never change it)."""
    global backbone_loads

    backbone_loads += 1
    return Backbone.load(BackboneConfig.model_validate_json(config), device, precision)


@lru_cache(maxsize=1)
def _backbone_sha256(backbone: Backbone) -> str:
    return weights_sha256(backbone.model)
