"""KV events as vLLM's and SGLang's own structs decode them."""

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
from runtime.features.kv_events.publisher import EventPublisher

# A directory with wheels (`pip download --no-deps vllm==0.32.0 sglang==0.5.23`), of which nothing is installed.
WHEELS = os.environ.get("RAMET_EVENT_WHEELS")
STRUCTS = {"EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"}
FILES = {"vllm": "vllm/distributed/kv_events.py", "sglang": "sglang/srt/disaggregation/kv_events.py"}

EVENTS = [
    Stored((5, 2**64 - 6), None, array("i", [0, 1, 2, 3]).tobytes(), Namespace()),
    Stored((7, 8), None, array("i", [4, 5, 6, 7]).tobytes(), Namespace("acme", "s")),
    Removed((7,), Namespace("acme", "s")),
]


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


@pytest.mark.parametrize("package", FILES)
def test_their_structs_decode_every_event(package, monkeypatch, tmp_path):
    batch = of_wheel(package, monkeypatch)
    publisher = EventPublisher(CacheConfig(kv_events=f"ipc://{tmp_path}/e", page_size=2, kv_events_of="all"))
    publisher.publish(EVENTS)
    publisher.close()
    payloads = [publisher._kept.read(n)[1] for n in range(3)]
    (cleared,), (everybodys,), (own, gone) = (msgspec.msgpack.decode(p, type=batch).events for p in payloads)
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (everybodys.block_hashes, everybodys.token_ids, everybodys.block_size) == ([5, 2**64 - 6], [0, 1, 2, 3], 2)
    assert (own.medium, own.parent_block_hash, own.lora_id, own.lora_name) == ("GPU", None, None, None)
    if hasattr(own, "extra_keys"):
        assert (everybodys.extra_keys, own.extra_keys) == (None, [("acme/s#",), None])
    else:
        assert (everybodys.cache_salt, own.cache_salt) == (None, "acme/s#")
    assert (gone.block_hashes, gone.medium) == ([7], "GPU")
