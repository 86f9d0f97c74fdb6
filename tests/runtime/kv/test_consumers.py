"""KV events as vLLM's and SGLang's own structs decode them."""

from __future__ import annotations

import ast
import os
import sys
import zipfile
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

import msgspec
import pytest

from radix import Namespace, Removed, Stored
from runtime.config import CacheConfig
from runtime.kv.publisher import EventPublisher

# A directory with wheels (`pip download --no-deps vllm==0.32.0 sglang==0.5.23`), of which nothing is installed.
WHEELS = os.environ.get("RAMET_EVENT_WHEELS")
STRUCTS = {"EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"}
FILES = {"vllm": "vllm/distributed/kv_events.py", "sglang": "sglang/srt/disaggregation/kv_events.py"}

EVENTS = [
    Stored((5, 2**64 - 6), None, array("i", [0, 1, 2, 3]).tobytes(), Namespace()),
    Stored((7, 8), None, array("i", [4, 5, 6, 7]).tobytes(), Namespace("acme", "s")),
    Removed((7,), Namespace("acme", "s")),
]


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    """An event of vLLM 0.32."""


class BlockStored(_Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(_Event):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def of_wheel(package: str, monkeypatch) -> type:
    """The batch of a package's wheel: its structs alone are run, and nothing that they stand among."""
    found = sorted(Path(WHEELS or "").glob(f"{package}-*.whl")) if WHEELS else []
    if not found:
        pytest.skip(f"needs a directory with {package}'s wheel in RAMET_EVENT_WHEELS")
    source = zipfile.ZipFile(found[-1]).read(FILES[package]).decode()
    classes = [
        ast.unparse(node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in STRUCTS
    ]
    module = ModuleType(f"events_of_{package}")
    module.__dict__.update(msgspec=msgspec, Any=Any, Optional=Optional, Union=Union, ExternalBlockHash=bytes | int)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where msgspec looks up the names of types
    exec("\n".join(classes), module.__dict__)
    return module.KVEventBatch


@pytest.fixture(params=["written", "vllm", "sglang"])
def batch(request, monkeypatch) -> type:
    return KVEventBatch if request.param == "written" else of_wheel(request.param, monkeypatch)


def test_their_structs_decode_every_event(batch, tmp_path):
    publisher = EventPublisher(CacheConfig(kv_events=f"ipc://{tmp_path}/e", page_size=2, kv_events_of="all"))
    publisher.publish(EVENTS)
    publisher.close()
    payloads = [payload for _, payload in publisher._kept]
    (cleared,), (everybodys,), (own, gone) = (msgspec.msgpack.decode(p, type=batch).events for p in payloads)
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (everybodys.block_hashes, everybodys.token_ids, everybodys.block_size) == ([5, 2**64 - 6], [0, 1, 2, 3], 2)
    assert (own.medium, own.parent_block_hash, own.lora_id, own.lora_name) == ("GPU", None, None, None)
    if hasattr(own, "extra_keys"):
        assert (everybodys.extra_keys, own.extra_keys) == (None, [("acme/s#",), None])
    else:
        assert (everybodys.cache_salt, own.cache_salt) == (None, "acme/s#")
    assert (gone.block_hashes, gone.medium) == ([7], "GPU")


def test_the_tiers_have_words_of_their_own(batch, tmp_path):
    publisher = EventPublisher(CacheConfig(kv_events=f"ipc://{tmp_path}/e", page_size=2))
    for tier in ("host", "disk", "store"):
        publisher.publish([EVENTS[0], Removed((5,), Namespace()), *EVENTS[1:]], tier)
    publisher.close()
    found = [msgspec.msgpack.decode(payload, type=batch).events for _, payload in list(publisher._kept)[1:]]
    assert [[event.medium for event in events] for events in found] == [
        ["CPU_PINNED"] * 2,
        ["DISK"] * 2,
        ["EXTERNAL"] * 2,
    ]
    assert found[0][0].token_ids == [0, 1, 2, 3], "and nothing of a tenant"
