"""Stores of KV blocks that are damaged, killed, filled up and slowed down: a block is right or it is a miss."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadgen.faults.live_tiers import live
from loadgen.faults.redis_server import PROGRAM, running_redis
from loadgen.faults.server import Finding
from loadgen.http.relay import Relay
from radix import Namespace
from runtime.kv.tiers.block import Block, Fingerprint, Format, Frame, read_head
from runtime.kv.tiers.disk import DiskStore
from runtime.kv.tiers.host import HostStore
from runtime.kv.tiers.opening import open_shared
from runtime.kv.tiers.store import BlockStore, Limits
from runtime.kv.tiers.worker import Loaded, TierWorker

_FORM = Format(Fingerprint("faults", "bfloat16", "KV", 16, "none").digest())
_PAYLOAD = 1 << 20
_LIMITS = Limits(1 << 30)
_WAIT_S = 120.0
# A load through a store that stalls ends after its time limits, each once.
_MOST_LOAD_S = 10.0
# Blocks of nobody's sequences, one a number.
_WRITER = """
import sys
from pathlib import Path
from loadgen.faults.tiers import _LIMITS, _FORM, block_of, payload_of
from runtime.kv.tiers.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), _LIMITS)
print(flush=True)
for number in range(int(sys.argv[2]), sys.maxsize):
    block = block_of(number)
    store.put(block.key, _FORM.encode(block, payload_of(number)), block.namespace.tenant, "evicted")
"""


def block_of(number: int) -> Block:
    return next(_FORM.chain(Namespace("faults"), number.to_bytes(8, "little") * 32, 256))


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(_PAYLOAD)


async def tiers(options: Sequence[str], scale: float, draw: random.Random) -> Finding:
    """Each part has stores of its own; those of a running server come last."""
    with_store = PROGRAM is not None and find_spec("redis") is not None
    found = await asyncio.to_thread(_run, scale, draw, with_store)
    found.facts["server"] = await live(options, draw, found.problems, with_store)
    found.rows += found.facts["server"].items()
    return found


def _run(scale: float, draw: random.Random, with_store: bool) -> Finding:
    problems: list[str] = []
    facts: dict[str, Any] = {}
    rows: list[Sequence[str]] = [("treatment", "result")]
    parts = _ON_A_DISK | _IN_A_STORE if with_store else _ON_A_DISK
    for name, part in tqdm(parts.items(), desc="tiers", disable=None):
        before = len(problems)
        seen, facts[name] = part(scale, draw, problems)
        rows.append((name, "; ".join([seen, *problems[before:]])))
    left_out = "" if with_store else "; no Redis or Valkey server, or no package redis: its treatments are left out"
    done = f"{len(parts)} treatments of stores of blocks, and those of a running server"
    return Finding(done, f"every block right, or a miss{left_out}", problems, facts, rows)


@contextmanager
def _disk(limits: Limits = _LIMITS) -> Iterator[tuple[DiskStore, TierWorker]]:
    with tempfile.TemporaryDirectory() as directory:
        store = DiskStore(Path(directory) / "cache", limits)
        worker = TierWorker(_FORM, [store])
        try:
            yield store, worker
        finally:
            worker.close()


def _put(store: BlockStore, number: int) -> bool:
    block = block_of(number)
    return store.put(block.key, _FORM.encode(block, payload_of(number)), block.namespace.tenant, "evicted")


def _framed(number: int) -> Frame:
    frame = _FORM.frame(block_of(number), _PAYLOAD)
    frame.payload[:] = payload_of(number)
    return frame


def _load(worker: TierWorker, numbers: Sequence[int]) -> list[Loaded]:
    return worker.load([block_of(number) for number in numbers], _PAYLOAD).result(_WAIT_S)


def _wrong(loaded: list[Loaded], numbers: Sequence[int]) -> int:
    return sum(each.payload != payload_of(number) for each, number in zip(loaded, numbers, strict=False))


def _damage(places: Sequence[int], change: Callable[[bytearray, int], None], problems: list[str]) -> dict[str, Any]:
    """Load a file that was changed at each of these places in turn."""
    believed = 0
    with _disk() as (store, worker):
        _put(store, 0)
        path = store.files.path(block_of(0).key)
        whole = path.read_bytes()
        for place in places:
            data = bytearray(whole)
            change(data, place)
            path.write_bytes(data)
            believed += len(_load(worker, [0]))
        path.write_bytes(whole)
        if _wrong(_load(worker, [0]), [0]) or not _load(worker, [0]):
            problems.append("an undamaged block is not found")
        counts = worker.stats()["tiers"]["disk"]["counts"]
    if believed:
        problems.append(f"{believed} damaged blocks were believed")
    misses = {name.removeprefix("mismatch_"): n for name, n in counts.items() if name.startswith("mismatch_")}
    if sum(misses.values()) != len(places):
        problems.append(f"{len(places)} damages, {sum(misses.values())} counted")
    return {"places": len(places), "misses": misses}


def _sample(scale: float, draw: random.Random) -> list[int]:
    """All places of the head and of the tokens, and some of the payload."""
    stored = b"".join(_FORM.encode(block_of(0), payload_of(0)))
    head = read_head(stored)
    assert not isinstance(head, str)
    begin = len(stored) - _PAYLOAD
    return [*range(begin), *sorted(draw.sample(range(begin, len(stored)), max(int(1000 * scale), 10)))]


def _flips(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    def flip(data: bytearray, place: int) -> None:
        data[place] ^= 1 << draw.randrange(8)

    found = _damage(_sample(scale, draw), flip, problems)
    return f"{found['places']} places, all misses: {found['misses']}", found


def _cuts(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    def cut(data: bytearray, place: int) -> None:
        del data[place:]

    found = _damage(_sample(scale, draw), cut, problems)
    return f"{found['places']} lengths, all misses: {found['misses']}", found


def _kills(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    rounds, apart, kept, wrong = max(int(50 * scale), 3), 10_000, 0, 0
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "cache"
        for number in range(rounds):
            command = [sys.executable, "-c", _WRITER, str(directory), str(number * apart)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
                assert writer.stdout is not None
                writer.stdout.readline()
                time.sleep(draw.random() * 0.2)
                writer.send_signal(signal.SIGKILL)
            store = DiskStore(directory, _LIMITS)
            worker = TierWorker(_FORM, [store])
            for block_number in range(number * apart, (number + 1) * apart):
                if block_of(block_number).key not in store.files:
                    break
                loaded = _load(worker, [block_number])
                kept += len(loaded)
                wrong += _wrong(loaded, [block_number]) + (not loaded)
            sizes = sum(path.stat().st_size for path in directory.glob("??/*"))
            if sizes > store.usage().bytes:
                problems.append(f"files have {sizes} bytes, of which the index knows {store.usage().bytes}")
            worker.close()
    if wrong:
        problems.append(f"{wrong} files that are no whole blocks")
    return f"{rounds} kills; {kept} blocks, all whole", {"kills": rounds, "blocks": kept, "wrong": wrong}


def _full(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    """No file may grow beyond half of a block, which the system refuses like a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _disk() as (store, worker):
        _put(store, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_PAYLOAD // 2, hard))
        try:
            for number in range(1, 5):
                worker.write(block_of(number), partial(_framed, number), _PAYLOAD, "evicted")
            _settle(worker)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        counts = worker.stats()["tiers"]["disk"]["counts"]
        left = os.listdir(store.files.directory / "unfinished")
        loaded = _load(worker, [0])
        if left or _wrong(loaded, [0]) or not loaded:
            problems.append(f"left behind: {left}; the block of before is {'there' if loaded else 'lost'}")
        again_s = _until(lambda: _write_and_find(worker, 1))
        if again_s >= _WAIT_S:
            problems.append("nothing was written once there was room again")
        failed = counts.get("failed", 0) + counts.get("skipped", 0)
        seen = f"4 writes: {failed} failed or not tried; written again {again_s:.1f} s after there was room"
        return seen, {"counts": counts, "again_s": again_s}


def _killed_store(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    numbers = range(8)
    with running_redis() as server:
        worker = TierWorker(_FORM, [HostStore(_LIMITS), open_shared(server.url)])
        for number in numbers:
            worker.write(block_of(number), partial(_framed, number), _PAYLOAD, "evicted")
        _settle(worker)
        worker.detach("host")
        loaded = _load(worker, numbers)
        if len(loaded) < len(numbers) or _wrong(loaded, numbers):
            problems.append(f"{len(loaded)} of {len(numbers)} blocks came back")
        server.process.kill()
        server.process.wait()
        took = [_timed(lambda: _load(worker, numbers))[0] for _ in range(10)]
    with running_redis(port=server.port):
        again_s = _until(lambda: _write_and_find(worker, 100))
    worker.close()
    if max(took) > _MOST_LOAD_S or again_s >= _WAIT_S:
        problems.append(f"a load took {max(took):.1f} s; found again after {again_s:.1f} s")
    seen = f"10 loads without it, at most {1000 * max(took):.0f} ms; used again {again_s:.1f} s after its new start"
    return seen, {"load_s": took, "again_s": again_s}


def _stalled(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    with running_redis() as server, Relay(server.port) as way:
        worker = TierWorker(_FORM, [open_shared(f"redis://127.0.0.1:{way.port}/0")])
        _write_and_find(worker, 0)
        way.bytes_per_s = 0
        took, loaded = [], []
        for _ in range(10):
            seconds, found = _timed(lambda: _load(worker, [0]))
            took.append(seconds)
            loaded += found
        way.bytes_per_s = None
        again_s = _until(lambda: bool(_load(worker, [0])))
        worker.close()
    if loaded or max(took) > _MOST_LOAD_S or again_s >= _WAIT_S:
        problems.append(f"{len(loaded)} blocks, at most {max(took):.1f} s; again after {again_s:.1f} s")
    seen = f"10 loads: {sum(took):.1f} s together, one at most {max(took):.2f} s; used again after {again_s:.1f} s"
    return seen, {"load_s": took, "again_s": again_s}


def _slow(scale: float, draw: random.Random, problems: list[str]) -> tuple[str, dict[str, Any]]:
    """A block that takes longer to load than to compute is asked for a few times, and then computed."""
    rate, compute_s, numbers = 4 * _PAYLOAD, 0.05, range(4)
    with running_redis() as server, Relay(server.port) as way:
        worker = TierWorker(_FORM, [open_shared(f"redis://127.0.0.1:{way.port}/0")])
        for number in numbers:
            _write_and_find(worker, number)
        way.bytes_per_s = rate
        blocks, took, loaded = [block_of(number) for number in numbers], [], []
        for _ in range(5):
            seconds, found = _timed(lambda: worker.load(blocks, _PAYLOAD, compute_s).result(_WAIT_S))
            took.append(seconds)
            loaded.append(len(found))
            if _wrong(found, numbers):
                problems.append("wrong payloads")
        counts = worker.stats()["tiers"]["store"]["counts"]
        worker.close()
    if loaded[-1] or not counts.get("too_slow"):
        problems.append(f"a store of {rate / 1e6:.0f} MB/s was read to the end: {loaded}")
    seen = f"{rate / 1e6:.1f} MB/s: blocks loaded in 5 requests {loaded}, the last after {1000 * took[-1]:.0f} ms"
    return seen, {"loaded": loaded, "load_s": took}


def _settle(worker: TierWorker) -> None:
    """Wait until nothing is queued."""
    _until(lambda: not worker.queued_bytes)


def _write_and_find(worker: TierWorker, number: int) -> bool:
    worker.write(block_of(number), lambda: _framed(number), _PAYLOAD, "evicted")
    _settle(worker)
    loaded = _load(worker, [number])
    return bool(loaded) and not _wrong(loaded, [number])


def _until(fulfilled: Callable[[], bool]) -> float:
    """Seconds until a condition holds; the time limit if it does not."""
    begun = time.monotonic()
    while time.monotonic() - begun < _WAIT_S:
        if fulfilled():
            return time.monotonic() - begun
        time.sleep(0.02)
    return _WAIT_S


def _timed(call: Callable[[], list[Loaded]]) -> tuple[float, list[Loaded]]:
    begun = time.monotonic()
    result = call()
    return time.monotonic() - begun, result


_ON_A_DISK = {
    "a byte of a file flipped": _flips,
    "a file cut": _cuts,
    "kill -9 of a writer": _kills,
    "a full disk": _full,
}
_IN_A_STORE = {"kill -9 of the store": _killed_store, "a store that stalls": _stalled, "a slow store": _slow}
