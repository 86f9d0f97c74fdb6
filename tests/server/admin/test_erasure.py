"""A tenant that is erased: the objects of server and engine, files and logs are searched for its words and tokens."""

import asyncio
import gc
import json
import logging
import sys
import threading
import traceback
import types
from array import array
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import torch

from runtime.config import make_config
from runtime.features.drafts.part import Drafts
from runtime.features.grammars.checks import GrammarChecks
from runtime.features.grammars.part import Grammars
from runtime.features.kv_events.part import KVEvents
from runtime.features.registry import open_preparers
from runtime.features.tiers.tiering import Tiering
from runtime.frontend.async_engine import AsyncEngine
from runtime.offline import EngineThread
from server.admin.dashboard import Feed
from server.app import create_app
from server.auth.keys import read_keys
from server.generation.service import GenerationService
from server.generation.store import ResponseStore
from server.http.context import find
from server.objects.documents import DocumentStore
from server.objects.schemas import SchemaStore
from server.telemetry.journal import open_trace

OURS = ("radix", "runtime", "server")
# What runs the tests keeps their names and parameters, and log records; it is reached through log handlers and hooks.
RUNNERS = ("_pytest", "execnet", "hypothesis", "pluggy", "pytest", "pytest_timeout", "xdist")
# The secret of texts, as a word and as its tokens; of names; and of outputs, as one token that is forced eight times.
WORD, NAME, FORCED = "Wolpertinger", "wildebeest", 23456
OTHERS = "Quaggaphile"
TEXT = "The {0} and the {0} met the {0} " * 6


class Needles:
    """What is searched for: texts, and runs of tokens."""

    def __init__(self, texts: list[str], runs: list[list[int]]):
        self.texts = [text.lower() for text in texts]
        self.packed = [*(text.encode() for text in self.texts), *(array("i", run).tobytes() for run in runs)]
        self.packed += [b"".join(map(msgspec.msgpack.encode, run)) for run in runs]  # as events have them
        self.firsts = {run[0] for run in runs}

    def within(self, value: object) -> bool:
        """Whether a value itself has one: a text, bytes, or a sequence of integers."""
        if isinstance(value, str):
            lower = value.lower()
            return any(text in lower for text in self.texts)
        if isinstance(value, list | tuple) and value:
            ints = [one if type(one) is int and abs(one) < 1 << 62 else -1 for one in value]
            value = array("q", ints) if self.firsts.intersection(ints) else b""
        if isinstance(value, torch.Tensor):
            whole = value.dtype in (torch.int32, torch.int64) and value.device.type == "cpu"
            value = value.detach().numpy() if whole else b""
        if isinstance(value, array | np.ndarray):
            its = np.asarray(value)
            value = its.astype(np.int32).tobytes() if its.dtype.kind in "iu" and its.itemsize > 1 else its.tobytes()
        if not isinstance(value, bytes | bytearray | memoryview):
            return False
        data = bytes(value)
        return any(one in data or one in data.lower() for one in self.packed)


def is_of(names: tuple[str, ...], module: object) -> bool:
    return str(module).partition(".")[0] in names


def parts_of(value: object) -> list[object]:
    """What an object refers to, but not the modules of functions, nor classes of others, nor what runs the tests."""
    if is_of(RUNNERS, type(value).__module__) or is_of(RUNNERS, getattr(value, "__module__", "")):
        return []
    if isinstance(value, types.FrameType):  # tests know the words, and call others or are called
        return [] if is_of(("tests", *RUNNERS), value.f_globals.get("__name__")) else list(value.f_locals.values())
    if isinstance(value, msgspec.Struct):  # some are unknown to the collector
        return [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, types.ModuleType) or (isinstance(value, dict) and "__builtins__" in value):
        return []
    if isinstance(value, type) and not is_of(OURS, value.__module__):
        return []
    return gc.get_referents(value)


def holders(needles: Needles, *roots: object) -> list[str]:
    """The values reachable from `roots` that have a needle, each with the objects on the way to it."""
    seen, found = {id(roots)}, []
    ways: list[tuple[object, tuple | None]] = [(root, None) for root in roots]
    while ways:
        value, above = ways.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if needles.within(value):
            shown, names = (value, above), []
            while shown is not None:
                names.append(f"{type(shown[0]).__name__} {str(shown[0])[:60]!r}" if len(names) < 12 else "")
                shown = shown[1]
            found.append(" of ".join(filter(None, names)))
        ways += [(part, (value, above)) for part in parts_of(value)]
    return found


def everything(*roots: object) -> Iterator[object]:
    """The roots, all that modules of ours keep, and the variables of threads that run."""
    yield from roots
    for name, module in list(sys.modules.items()):
        if is_of(OURS, name):
            yield from vars(module).values()
    for number, frame in sys._current_frames().items():
        frames = [found for found, _ in traceback.walk_stack(frame)]
        runs_tests = any(is_of(RUNNERS, found.f_globals.get("__name__")) for found in frames)
        if number != threading.get_ident() and not runs_tests:
            yield from frames


def files_with(needles: Needles, directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and needles.within(path.read_bytes())]


class Served:
    """The whole server in this process, with the keys of an admin and of alice, and a host tier, a disk tier, events
    and a trace below `directory`."""

    def __init__(self, model: Path, directory: Path):
        self.directory = directory
        (directory / "keys").write_text("boss boss-secret-key admin\nalice alice-secret-key\n")
        options = {"api_keys": directory / "keys", "record_trace": directory / "trace", "log_level": "debug"}
        events = {"kv_events": f"ipc://{directory}/events,ipc://{directory}/replay", "hold_time": "900"}
        tiers = {"host_memory": 0.01, "disk_cache": directory / "disk", "disk_space": 0.01}
        self.config = make_config(
            model=str(model), dtype="float32", device="cpu", pool_tokens=8192, kv_events_of="all",
            **options, **events, **tiers,
        )  # fmt: skip

    async def __aenter__(self) -> "Served":
        tenants = read_keys(self.config.server.api_keys)
        self.host = EngineThread(self.config)
        self.engine = AsyncEngine(self.config, host=self.host, open_preparers=open_preparers)
        await self.engine.start()
        trace = open_trace(self.config.server.record_trace, tenants)
        self.app = create_app(self.engine, self.config, tenants, trace=trace)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()

    async def ask(self, method: str, path: str, body: dict | None = None, key: str = "alice") -> dict:
        transport, headers = httpx.ASGITransport(self.app), {"authorization": f"Bearer {key}-secret-key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            answer = await client.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stores(self) -> dict[str, object]:
        """All that keeps something of a tenant, by name."""
        core, service = self.host.core, find(self.app, GenerationService)
        tiering = core.part(Tiering)
        return {
            "documents": find(self.app, DocumentStore),
            "schemas": find(self.app, SchemaStore),
            "responses": find(self.app, ResponseStore),
            "answers": service._answers,
            "journal": service._journal,
            "page": find(self.app, Feed)._views,
            "previews": Feed._decode,
            "checked grammars": next(one for one in self.engine._preparers if isinstance(one, GrammarChecks))._checked,
            "grammars": core.part(Grammars).compiler._kept,
            "tree": core.cache.tree,
            "pins": core.cache.pins.pins,
            "host tier": tiering.tiers.worker,
            "recent outputs": core.part(Drafts).drafter._recent,
            "events": core.part(KVEvents).publisher._kept,
        }


async def live_of(served: Served, text: str, key: str, name: str) -> None:
    """Requests of a key through all that keeps something of them."""
    ids = served.engine.tokenizer.encode(text)
    few = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    chat = {"model": served.engine.info.name, "messages": [{"role": "user", "content": text}], "max_tokens": 2}

    async def ask(path: str, **body: object) -> dict:
        return await served.ask("POST", path, body, key)

    for _ in range(2):  # what is used twice is stored in the tiers
        forced = {**few, "logit_bias": {str(FORCED): 100}} if key == "alice" else few
        await ask("/generate", input_ids=ids, sampling_params=forced, rid=f"{name}-{_}")
        first = await ask("/v1/chat/completions", **chat)
    await ask("/v1/chat/completions", **chat, explain=True, comparison_response_id=first["id"])
    await ask("/v1/responses", model=chat["model"], input=text, max_output_tokens=16, store=True)
    await ask("/v1/messages", **chat)
    stored = await ask("/v1/documents", text=text, title=name, encode=True)
    await ask("/generate", segments=[{"document": {"id": stored["id"]}}, {"text": text}], sampling_params=few)
    pml = f"<schema name='{name}'><module name='m'>{text}</module></schema>"
    await ask("/v1/schemas", pml=pml, encode=True)
    await ask("/generate", pml=f"<prompt schema='{name}'><m/>{text}</prompt>", sampling_params=few)
    schema = {"type": "object", "properties": {text: {"type": "integer"}}}
    await ask("/generate", text=text, sampling_params={**few, "json_schema": json.dumps(schema)})
    await served.ask("POST", "/cache/pin", {"text": text, "tenant": key, "name": name}, "boss")


def test_all_that_is_kept_of_a_tenant_is_erased(tiny_dir, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)

    async def live() -> None:
        async with Served(tiny_dir, tmp_path) as served:
            encode = served.engine.tokenizer.encode
            needles = Needles([WORD, NAME], [encode(f" {WORD}"), [FORCED] * 8])
            others = Needles([OTHERS], [encode(f" {OTHERS}")])
            await live_of(served, TEXT.format(WORD), "alice", NAME)
            await live_of(served, TEXT.format(OTHERS), "boss", "others")
            await served.ask("POST", "/cache/search", {"text": WORD, "limit": 1}, "boss")
            await seen_by_a_viewer(served)
            tiering = served.host.core.part(Tiering)
            tiering.note()
            await asyncio.to_thread(tiering.tiers.worker.drain)
            missing = [name for name, store in served.stores().items() if not holders(needles, store)]
            assert missing == []
            assert files_with(needles, tmp_path / "disk"), "the pins for the next start"
            assert '"tenant":"alice"' in (tmp_path / "trace").read_text()

            erased = await served.ask("DELETE", "/cache/tenants/alice", key="boss")

            assert min(erased["erased_tokens"], *erased["erased_blocks"].values()) > 0
            gc.collect()
            assert holders(needles, *everything(served)) == []
            assert files_with(needles, tmp_path) == []
            traced = (tmp_path / "trace").read_text()
            assert '"tenant":"boss"' in traced
            assert '"tenant":"alice"' not in traced
            assert holders(others, *everything(served)), "what is kept of others stays"

    asyncio.run(live())
    assert [record for record in caplog.records if WORD.lower() in str(vars(record)).lower()] == []


async def seen_by_a_viewer(served: Served) -> None:
    """An operator's page that is open, and shows the tree."""
    feed, boss = find(served.app, Feed), read_keys(served.config.server.api_keys)[0]
    feed.enter(boss)
    async for event in feed.follow(boss):
        if "tree" in event:
            return


@pytest.mark.parametrize(
    "value",
    [
        "of an elwetritsch",
        b"of an elwetritsch",
        [0, 19481, 456, 862],
        (19481, 456, 862),
        array("i", [19481, 456, 862]),
        torch.tensor([1, 19481, 456, 862]),
        np.array([19481, 456, 862], dtype=np.int64),
    ],
)
def test_the_search_finds_every_form(value):
    needles = Needles(["Elwetritsch"], [[19481, 456, 862]])

    class Holder:
        __slots__ = ("kept",)

    holder = Holder()
    holder.kept = {1: (value,)}
    assert holders(needles, holder)
    assert holders(needles, lambda: holder)
    assert not holders(Needles(["other"], [[456, 19481]]), holder)


def test_the_search_stays_out_of_what_runs_the_tests(request):
    needles = Needles([request.node.name], [])
    assert needles.within(request.node.nodeid)
    assert not holders(needles, request.node.reportinfo, request.config.pluginmanager.hook, logging.root.handlers)
