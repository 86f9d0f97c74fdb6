"""Tiers in the engine: opening them from options, operators' calls on them, and pins that survive a restart."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from radix import Event, Meta
from runtime.batch import ForwardBatch
from runtime.calls import AddPin, State
from runtime.config import Config, TierConfig
from runtime.engine.core import EngineCore
from runtime.engine.part import Part
from runtime.errors import ModelError, PinRefused
from runtime.execution.executor import Executor
from runtime.execution.sizing import main_memory
from runtime.features.tiers.block import Fingerprint, Format
from runtime.features.tiers.files import FileStore
from runtime.features.tiers.host import HostStore
from runtime.features.tiers.loads import Load
from runtime.features.tiers.opening import open_cipher, open_shared
from runtime.features.tiers.resume import NotedPin, Resume
from runtime.features.tiers.store import BlockStore
from runtime.features.tiers.tiers import CLOSE_S, Tiers
from runtime.features.tiers.worker import TierWorker
from runtime.kv.segments import Run
from runtime.models.seeing import describe_sight
from runtime.models.weights import digest_weights
from runtime.protocol import Finish, TokenEvent
from runtime.request import Request, Work

if TYPE_CHECKING:
    from runtime.features.tiers.crypt import KeyFile

log = logging.getLogger("ramet.engine")

T = TypeVar("T")

_GIB = 1 << 30
# Longest wait for a load that may end at once: in seconds, and while requests run as a share of the last step.
_LOAD_WAIT_S, _LOAD_SHARE = 0.002, 0.02
# Most loads that one request waits for, one after another.
_MOST_LOADS = 4
# An idle engine wakes this often to publish events of what the tiers have written and dropped.
_IDLE_WITH_EVENTS_S = 0.2
# Seconds after which the pins are saved again for the next start.
_NOTE_S = 60.0


class Tiering(Part):
    """Connects the tiers to the engine's requests and to operators' calls.

    Attributes:
        tiers: stores blocks of the tree, and loads blocks for requests.
    """

    def __init__(self, core: EngineCore, cipher: KeyFile | None, stores: list[BlockStore]):
        self._core = core
        self.idle_s = None if core.cache.events is None else _IDLE_WITH_EVENTS_S
        path = Path(core.info.path)
        form = Format(_fingerprint(core.config, core.executor, path), cipher, describe_sight(path))
        self.tiers = Tiers(core.cache, TierWorker(form, stores))
        disk = next((store for store in stores if isinstance(store, FileStore) and store.name == "disk"), None)
        self._resume = None if disk is None else Resume(disk.directory, form)
        self._noted_s = time.monotonic()
        # Writes and erases pins, in order.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="kv-aside")
        self._returning: dict[Load, list[NotedPin]] = {}
        self._num_loads: Counter[Request] = Counter()

    # -- operators -------------------------------------------------------------------------------------------

    def erase_blocks(self, tenant: str | None) -> Generator[None, None, dict[str, int | None]]:
        erasing = self._aside.submit(self._erase_aside, tenant)
        self.tiers.erased(tenant, erasing)
        return (yield from _wait(erasing))

    def _erase_aside(self, tenant: str | None) -> dict[str, int | None]:
        if self._resume is not None:
            self._resume.erase(tenant)
        return self.tiers.worker.erase(tenant).result()

    def kv_events(self) -> Mapping[str, list[Event]]:
        return self.tiers.worker.ledger.take()

    def tiers_of(self, nodes: Sequence[int]) -> Generator[None, None, dict[int, list[str]]]:
        keys = [self.tiers.keys.get(node) for node in nodes]
        places = (yield from _wait(self.tiers.worker.where(keys))) if any(keys) else [[] for _ in nodes]
        return dict(zip(nodes, places, strict=True))

    def report(self, state: State) -> None:
        self.tiers.report(state)

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self.tiers.loads)

    def blocked_on(self, request: Request) -> Load | None:
        """A load of KV that the request reads. Their number is limited: loaded KV may be evicted before admission."""
        if self._num_loads[request] >= _MOST_LOADS:
            return None
        load = self.tiers.ask(request.lease.reads(), request.owner)
        self._num_loads[request] += load is not None
        return load

    def poll(self, step_s: float) -> Sequence[TokenEvent]:
        """Wake the requests whose loads have ended, after a short wait for loads that were begun just now."""
        if not self.tiers.loads:
            return ()
        core = self._core
        patience_s = min(_LOAD_WAIT_S, _LOAD_SHARE * step_s) if core.scheduler.running else _LOAD_WAIT_S
        for load in self.tiers.poll(patience_s):
            for part in load.parts:
                for strategy in core.strategies.opened.values():
                    strategy.restored(part.run.tokens, part.run.namespace)
            for request in core.scheduler.wake(load):
                _note_loaded(request, load)
            for pin in self._returning.pop(load, ()):
                self._pin_again(pin)
        return ()

    def launching(self, batch: ForwardBatch) -> None:
        self.tiers.settle([group.kv_write for group in batch.groups])

    def booked(self, work: Sequence[Work], num_rows: int, seconds: float) -> None:
        if any(item.prefills for item in work):
            self.tiers.computed(num_rows, seconds)

    def ended(self, request: Request, finish: Finish) -> None:
        self._num_loads.pop(request, None)

    # -- from one start to the next --------------------------------------------------------------------------

    def settle(self) -> None:
        if time.monotonic() > self._noted_s + _NOTE_S:
            self.note()

    def note(self) -> None:
        """Save the pins for the next start."""
        self._noted_s = time.monotonic()
        if self._resume is not None:
            pins = self._core.cache.pins
            pins.expire()
            noted = [NotedPin.of(pin, pins.view(pin).expires_in_s) for pin in pins.pins.values()]
            self._aside.submit(self._resume.write, noted)

    def resume(self) -> None:
        """Pin again what was pinned before the restart."""
        self._core.parts.wait(self, True)
        for pin in [] if self._resume is None else self._resume.read():
            self._pin_again(pin)

    def _pin_again(self, pin: NotedPin) -> None:
        """Pin a prefix or an entry, after a load of what the stores have of it."""
        left_s = pin.left_s
        run = self._run_of(pin)
        if run is None or (left_s is not None and left_s <= 0):
            return
        load = self.tiers.ask([run], pin.namespace.owner)
        if load is not None:
            self._returning.setdefault(load, []).append(pin)
        elif pin.namespace.entry:
            try:
                self._core.cache.pins.pin(run.tokens, pin.namespace, pin.name, left_s)
            except PinRefused as refused:
                log.warning("pin %s does not return: %s", pin.name or "without a name", refused)
        else:  # the missing part of a prefix is computed
            self._core.calls.ask(None, AddPin(pin.tokens, pin.namespace, "", pin.name, left_s))

    def _run_of(self, pin: NotedPin) -> Run | None:
        """The path of a pin; None if no strategy of this engine knows the path's record."""
        meta: Meta | None = None
        if pin.meta is not None:
            made = (strategy.meta_of(pin.namespace, pin.meta) for strategy in self._core.strategies.values())
            if (meta := next(filter(None, made), None)) is None:
                return None
        tokens, strategy = array("i", pin.tokens), self._core.strategies.default
        if strategy.keeps_prompts and not pin.namespace.entry:
            return strategy.runs(tokens, pin.namespace)[0]
        return Run(tokens, pin.namespace, meta=meta)

    def close(self) -> None:
        """Save the pins for the next start, write as much of the tree as time allows, and close the stores."""
        until = time.monotonic() + CLOSE_S
        self.note()
        if self._resume is not None:
            self.tiers.save_all(until)
        self._aside.shutdown()
        self.tiers.close(until)


def _wait(future: Future[T]) -> Generator[None, None, T]:
    while not future.done():
        yield
    return future.result()


def _note_loaded(request: Request, load: Load) -> None:
    """Report the tokens that were loaded for a request before its admission, by tier."""
    if (admission := request.event.admission) is not None and request.cached_tokens < 0:
        for tier, tokens in load.tokens.items():
            admission.loaded_tokens[tier] = admission.loaded_tokens.get(tier, 0) + tokens


def open_tiers(config: TierConfig) -> tuple[KeyFile | None, list[BlockStore]]:
    """The cipher (None without a key file) and the stores of the options. Raises ModelError if one cannot be used."""
    key, stores = config.kv_encryption_key_file, list[BlockStore]()
    cipher = None if key is None else open_cipher(key)
    if config.host_memory is not None:
        if config.host_memory * _GIB > (has := main_memory()):
            raise ModelError(f"--host-memory is {config.host_memory:g} GiB; this machine has {has / _GIB:.1f}")
        stores.append(HostStore(int(config.host_memory * _GIB)))
    if config.disk_cache is not None:
        stores.append(FileStore(config.disk_cache, "--disk-cache", int(config.disk_space * _GIB)))
    if config.kv_store is not None:
        stores.append(open_shared(config.kv_store))
    return cipher, stores


def _fingerprint(config: Config, executor: Executor, model: Path) -> bytes:
    """16 bytes: a digest of everything that a block's KV depends on, except tokens, namespace and sight."""
    spec = executor.spec
    layers, _, heads, head_dim = executor.pool.k.shape
    fingerprint = Fingerprint(
        "random" if config.model.random_weights else digest_weights(model, spec),
        f"{executor.pool.k.dtype} of {executor.dtype} {executor.decoder.quantization}",
        f"{layers} {heads} {head_dim}",
        config.cache.page_size,
        spec.fingerprint,
        shard=f"all of {executor.pool.ranks}",
        kind=spec.sees,
    )
    return fingerprint.digest()
