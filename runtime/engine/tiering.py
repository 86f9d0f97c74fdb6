"""Tiers in the engine: opened as the options ask for them, operators' calls, and what the next start takes over."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import nlargest
from pathlib import Path
from typing import Any, Protocol

from radix.node import TOKEN_BYTES, Meta
from runtime.config import Config, TierConfig
from runtime.engine.resume import Prefix, Resume
from runtime.engine.scheduler import Scheduler
from runtime.errors import ModelError
from runtime.execution.executor import Executor
from runtime.execution.sizing import main_memory
from runtime.kv.cache import PagedCache
from runtime.kv.tiers.block import Cipher, Fingerprint, Format
from runtime.kv.tiers.disk import DiskStore
from runtime.kv.tiers.host import HostStore
from runtime.kv.tiers.loads import Load
from runtime.kv.tiers.opening import open_cipher, open_shared
from runtime.kv.tiers.store import BlockStore, Limits
from runtime.kv.tiers.tiers import Tiers
from runtime.kv.tiers.worker import TierWorker
from runtime.models.diffusion import DiffusionSpec
from runtime.models.weights import digest_weights
from runtime.protocol import AddPin, AttachTier, Call, DetachTier, EraseTenant, FlushCache, Outbound, Reply
from runtime.request import Run
from runtime.reuse.strategy import Strategy

log = logging.getLogger("ramet.engine")

_GIB = 1 << 30
# Wait for KV that may come at once: of an engine with nothing to run, and of one that runs as a share of its last step.
LOAD_WAIT_S, _LOAD_SHARE = 0.002, 0.02
# Seconds between two notes of what the next start takes over; they hold so large a part of the pool.
_NOTE_S, _HOT_SHARE, _MOST_HOT = 60.0, 0.25, 256


class _Core(Protocol):
    """The parts of `EngineCore` that tiering uses."""

    config: Config
    cache: PagedCache
    executor: Executor
    scheduler: Scheduler
    strategies: dict[str, Strategy]

    def handle(self, message: Any) -> Outbound | None: ...


class Tiering:
    """Tiers of an engine, and calls on them that wait for stores.

    Attributes:
        tiers: the tiers themselves.
    """

    def __init__(self, core: _Core, model: Path, cipher: Cipher | None, stores: list[BlockStore]):
        """Put stores below the pool of the model directory `model`; more may come."""
        self._core, self._model = core, model
        self._form = Format(cipher=cipher)
        self.tiers = Tiers(core.cache, TierWorker(self._form))
        self._resume: Resume | None = None
        if stores:
            self._attach(stores, self._fingerprint())
        self._noted_s = time.monotonic()
        # Opens stores and writes notes, in order.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="kv-aside")
        self._waiting: list[tuple[int, Future[Any], Callable[[Any], dict[str, Any]]]] = []
        self._recalled: deque[Prefix] = deque()
        self._loading: tuple[Load, Prefix] | None = None
        self._num_pins = 0

    # -- operators -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether stores are waited for."""
        return bool(self._waiting or self.tiers.loads)

    def handle(self, message: Call, answer: Reply) -> Reply | None:
        """The answer to a call of which the tree's part is done; None: it comes with `take_replies`."""
        worker, found = self.tiers.worker, answer.result
        if (isinstance(message, FlushCache) and message.tiers) or isinstance(message, EraseTenant):
            tenant = message.tenant if isinstance(message, EraseTenant) else None
            self.tiers.erased(tenant)
            erasing = self._aside.submit(self._erase, self._resume, tenant)
            self._wait(message.call, erasing, lambda blocks: {**found, "erased_blocks": blocks})
        elif isinstance(message, AttachTier):
            quota = self._core.config.tiers.tier_quota
            options = TierConfig(**{**message.options, "tier_quota": quota})
            opening = self._aside.submit(lambda: (open_stores(options), self._fingerprint()))
            self._wait(message.call, opening, lambda opened: self._attach(*opened))
        elif isinstance(message, DetachTier) and (closing := worker.detach(message.name)) is not None:
            if message.name == "disk":
                self.note()
                self._resume = None
            self._wait(message.call, closing, lambda _: {"found": True})
        elif nodes := found.get("nodes") or found.get("blocks"):
            return self._mark(message.call, nodes, answer)
        else:
            return answer
        return None

    def _wait(self, call: int, future: Future[Any], answer: Callable[[Any], dict[str, Any]]) -> None:
        self._waiting.append((call, future, answer))
        future.add_done_callback(self.tiers.tell)

    def _erase(self, resume: Resume | None, tenant: str | None) -> dict[str, int | None]:
        if resume is not None:
            resume.erase(tenant)
        return self.tiers.worker.erase(tenant).result()

    def _mark(self, call: int, nodes: list[dict[str, Any]], answer: Reply) -> Reply | None:
        """Say of each node of the tree which tiers hold the block of its first page."""

        def done(places: list[list[str]]) -> dict[str, Any]:
            for node, place in zip(nodes, places, strict=True):
                node["tiers"] = place
            return answer.result

        keys = [self.tiers.keys.get(node["id"]) for node in nodes]
        if any(keys):
            self._wait(call, self.tiers.worker.where(keys), done)
            return None
        return Reply(call, done([[] for _ in nodes]))

    def _fingerprint(self) -> bytes:
        return self._form.fingerprint or _fingerprint(self._core.config, self._core.executor, self._model)

    def _attach(self, stores: list[BlockStore], fingerprint: bytes) -> dict[str, Any]:
        self._form.fingerprint = fingerprint
        for store in stores:
            if store.name in self.tiers.worker.names:
                store.close()
                return {"failed": f"there is a tier {store.name} already"}
            self.tiers.worker.attach(store)
            if isinstance(store, DiskStore):
                self._resume = Resume(store.files.directory, self._form)
        return {"tiers": self.tiers.worker.names}

    def take_replies(self) -> list[Reply]:
        """Answers to calls whose stores have answered."""
        if time.monotonic() > self._noted_s + _NOTE_S:
            self.note()
        replies = []
        for item in [item for item in self._waiting if item[1].done()]:
            self._waiting.remove(item)
            call, future, answer = item
            error = future.exception()
            why = error.message if isinstance(error, ModelError) else str(error)
            replies.append(Reply(call, answer(future.result()) if error is None else {"failed": why}))
        return replies

    # -- from one start to the next --------------------------------------------------------------------------

    def note(self) -> None:
        """Note pins and the hottest prefixes for the next start."""
        self._noted_s = time.monotonic()
        if self._resume is not None:
            self._aside.submit(self._resume.write, self._worth_noting())

    def _worth_noting(self) -> list[Prefix]:
        cache = self._core.cache
        cache.pins.expire()
        found = [Prefix.of(pin.node) for pin in cache.pins.pins.values()]
        for prefix, pin in zip(found, cache.pins.pins.values(), strict=True):
            left_s = cache.pins.describe(pin)["expires_in_s"]
            prefix.is_pin, prefix.name = True, pin.name
            prefix.expires = None if left_s is None else time.time() + left_s
        room = int(cache.pool.num_pages * _HOT_SHARE) * cache.page_size * TOKEN_BYTES
        leaves = (node for node in cache.tree.nodes() if node.hits and not node.children)
        for node in nlargest(_MOST_HOT, leaves, key=lambda node: (node.hits, node.last_use)):
            prefix = Prefix.of(node)
            room -= len(prefix.tokens)
            if room < 0:
                break
            found.append(prefix)
        return found

    def recall(self) -> None:
        """Load what the last start has noted, one after another: they have beginnings in common."""
        self._recalled += [] if self._resume is None else self._resume.read()
        self._recall_next()

    def _recall_next(self) -> None:
        while self._recalled and self._loading is None:
            prefix = self._recalled.popleft()
            is_known, meta = self._meta_of(prefix)
            if not is_known:
                continue
            run = Run(array("i", prefix.tokens), prefix.namespace, meta=meta)
            load = self.tiers.ask([run], prefix.namespace.owner)
            if load is None:
                self._pin(prefix)
            else:
                self._loading = load, prefix

    def _meta_of(self, prefix: Prefix) -> tuple[bool, Meta | None]:
        """Whether anybody knows how to read such a prefix, and its record."""
        if prefix.meta is None:
            return True, None
        made = (strategy.meta_of(prefix.namespace, prefix.meta) for strategy in self._core.strategies.values())
        meta = next(filter(None, made), None)
        return meta is not None, meta

    def take_loads(self, step_s: float) -> None:
        """Wake the requests whose KV has come; those that arrived just now may get it at once.

        `step_s`: seconds of the last step.
        """
        core = self._core
        patience_s = min(LOAD_WAIT_S, _LOAD_SHARE * step_s) if core.scheduler.running else LOAD_WAIT_S
        for load in self.tiers.poll(patience_s):
            for part in load.parts:
                for strategy in core.strategies.values():
                    strategy.restored(part.run.tokens, part.run.namespace)
            core.scheduler.loaded(load)
            self._go_on(load)

    def _go_on(self, load: Load) -> None:
        """Pin again what was pinned and has come, and go on with the next."""
        if self._loading is not None and self._loading[0] is load:
            _, prefix = self._loading
            self._loading = None
            self._pin(prefix)
            self._recall_next()

    def _pin(self, prefix: Prefix) -> None:
        """A prefix of which something is lost is computed; an entry is not."""
        left_s = prefix.left_s
        if not prefix.is_pin or (left_s is not None and left_s <= 0):
            return
        if prefix.namespace.entry:
            self._core.cache.pins.pin(array("i", prefix.tokens), prefix.namespace, prefix.name, left_s)
        else:
            self._num_pins += 1
            call = -self._num_pins  # nobody waits for its answer
            self._core.handle(AddPin(call, prefix.tokens, prefix.namespace, "", prefix.name, left_s))

    def close(self) -> None:
        """Note what the next start takes over, write the hottest prefixes, and close the stores."""
        self.note()
        if self._resume is not None:
            nodes = self._core.cache.tree.nodes()
            for node in sorted(nodes, key=lambda node: (node.hits, node.last_use), reverse=True):
                self.tiers.save(node)
        self._aside.shutdown()
        self.tiers.close()


def open_tiers(config: TierConfig) -> tuple[Cipher | None, list[BlockStore]]:
    """The cipher of a key file, if any, and the stores of some options. Raises ModelError if one cannot be used."""
    key = config.kv_encryption_key_file
    return None if key is None else open_cipher(key), open_stores(config)


def open_stores(config: TierConfig) -> list[BlockStore]:
    """The stores of some options. Raises ModelError if one cannot be used."""
    stores: list[BlockStore] = []
    if config.host_memory is not None:
        if config.host_memory * _GIB > (has := main_memory()):
            raise ModelError(f"--host-memory is {config.host_memory:g} GiB; this machine has {has / _GIB:.1f}")
        stores.append(HostStore(_limits(config.host_memory, config.tier_quota)))
    if config.disk_cache is not None:
        stores.append(DiskStore(config.disk_cache, _limits(config.disk_space, config.tier_quota)))
    if config.kv_store is not None:
        stores.append(open_shared(config.kv_store))
    return stores


def _limits(gib: float, share: float) -> Limits:
    return Limits(int(gib * _GIB), default=int(gib * _GIB * share))


def _fingerprint(config: Config, executor: Executor, model: Path) -> bytes:
    """A digest of all that KV depends on, beside its tokens and what lies before them."""
    spec = executor.spec
    layers, _, heads, head_dim = executor.pool.k.shape
    fingerprint = Fingerprint(
        "random" if config.model.random_weights else digest_weights(model, spec),
        f"{executor.kv_dtype} of {executor.dtype} {config.model.quantization}",
        f"{layers} {heads} {head_dim}",
        config.cache.page_size,
        spec.fingerprint,
        shard=f"all of {executor.pool.ranks}",
        kind=_kind(spec.diffusion),
    )
    return fingerprint.digest()


def _kind(diffusion: DiffusionSpec | None) -> str:
    if diffusion is None:
        return "causal"
    return "diffusion" if diffusion.attended is None else f"blocks of {diffusion.attended}"
