"""The life of entries: computed once, shared, evicted, retracted, pinned; and what is refused."""

import random
from array import array

import pytest
import torch
from msgspec import convert
from transformers import AutoModelForCausalLM

from radix import Namespace
from runtime.asks import ReuseAsk
from runtime.calls import AddPin, GetTree, LoadAdapter, PinView
from runtime.errors import PinRefused
from tests.lora import merged, save_lora
from tests.runtime.engine.driver import call
from tests.runtime.features.chunks.plain import Module, Prompt, Reference, draw_tokens
from tests.runtime.reuse.contract.subject import NEW, World
from tests.runtime.reuse.contract.subjects import Modules, check_pins
from tests.tiny import VOCAB

LAYERS = 3


def module(draw: random.Random, length: int, at: int = 0, holes: tuple[int, ...] = (), name: str = "/m") -> Module:
    return Module(name, draw_tokens(draw, length), list(range(at, at + length)), list(holes))


def behind(draw: random.Random, modules: list[Module], length: int = 5) -> Prompt:
    """A prompt of modules and some tokens behind them."""
    at = max((m.positions[-1] + 1 for m in modules), default=0)
    return Prompt(modules, draw_tokens(draw, length), list(range(at, at + length)))


# -- what it equals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [{"kernels": "torch"}, {"kernels": "auto"}, {"model_impl": "transformers"}])
@pytest.mark.parametrize("page_size", [1, 16])
def test_many_short_modules_are_read_together(ids_dir, code, page_size):
    draw = random.Random(6)
    modules = [module(draw, draw.choice([1, 3, 16, 19]), at=10 * i, name=f"/{i}") for i in range(40)]
    world = World(Modules(ids_dir), page_size=page_size, **code)
    edges = []
    run = world.core.executor.run
    world.core.executor.run = lambda batch: (edges.append(len(batch.groups[0].attention.edges)), run(batch))[1]
    world.one("first", behind(draw, modules))
    edges.clear()
    for rid, some in (("same", modules), ("turned", modules[::-1]), ("fewer", modules[:35]), ("few", modules[:3])):
        world.ask(rid, behind(draw, some))
    world.run()
    world.check()
    assert max(edges) <= 4 + 2 + 3, "own rows, those of all or all but five, and three alone"


# -- computed once -------------------------------------------------------------------------------------------


def test_two_requests_that_import_a_module_at_once_compute_it_once(ids_dir):
    draw = random.Random(4)
    shared, other = module(draw, 50, 3, (7, 8, 9)), module(draw, 20, 53)
    prompts = [behind(draw, [shared]), behind(draw, [shared, other]), behind(draw, [other, shared])]
    world = World(Modules(ids_dir), chunk_tokens=16, page_size=16)
    for i, prompt in enumerate(prompts):
        world.ask(f"{i}", prompt)
    blocked, run = [], world.core.executor.run
    world.core.executor.run = lambda batch: blocked.append(world.core.scheduler.num_blocked) or run(batch)
    world.run()
    world.check()
    assert blocked[:4] == [2] * 4, "while the shared module is encoded, in four chunks"
    assert world.core.totals()["encoded_modules"] == 2
    assert world.row_layers == LAYERS * (50 + 20 + 3 * (5 + NEW - 1))
    assert [world.cached(str(i)) for i in range(3)] == [0, 47, 67]
    first, last = (world.report(str(i)) for i in (0, 2))
    assert first == {"strategy": "modules", "exact": False, "exact_modules": True, "modules": ["/m"],
                     "computed_modules": ["/m"],
                     "reused_tokens": 0, "computed_tokens": 52}  # fmt: skip
    assert last == {"strategy": "modules", "exact": False, "exact_modules": True, "modules": ["/m"] * 2,
                    "computed_modules": [],
                    "reused_tokens": 67, "computed_tokens": 5}  # fmt: skip
    assert world.core.counters["prompt_tokens"] == world.core.counters["queried_tokens"] == 52 + 72 + 72


def test_several_missing_modules_are_encoded_in_one_step(ids_dir):
    draw = random.Random(5)
    world = World(Modules(ids_dir), step_tokens=64)
    world.ask("a", behind(draw, [module(draw, 10, 10 * i) for i in range(5)]))
    world.step()
    assert world.core.totals()["encoded_modules"] == 5
    world.run()
    world.check()
    assert world.core.counters["steps"] == 1 + 1 + NEW - 1


def test_a_prompt_of_one_token_is_not_taken_for_decoding(ids_dir):
    draw = random.Random(6)
    world = World(Modules(ids_dir), overlap="on", step_tokens=32)
    world.one("a", behind(draw, [module(draw, 100)], 1))
    world.check()
    assert world.core.counters["steps"] == 4 + NEW


def test_pages_of_a_module_exist_once_for_many_requests(ids_dir):
    draw = random.Random(7)
    modules = [module(draw, 40), module(draw, 33, 40)]
    world = World(Modules(ids_dir), page_size=16, max_running=16)
    for i in range(12):
        world.ask(f"{i}", behind(draw, modules[:: 1 if i % 2 else -1]), 16)
    for _ in range(8):
        world.step()
    assert len(world.core.scheduler.running) == 12
    state = world.core.state()
    assert state["pages_tree"] == 3 + 3
    assert state["pages_private"] == 12
    world.run()


def test_equal_reads_become_one_edge_with_their_last_pages(ids_dir):
    """Two modules whose last pages are used in part, in another order in each request."""
    draw = random.Random(8)
    modules = [module(draw, 301), module(draw, 37, 301)]
    plans = []
    world = World(Modules(ids_dir), page_size=16, pool_tokens=8192, max_running=16)
    run = world.core.executor.run
    world.core.executor.run = lambda batch: plans.append(batch.groups[0].attention) or run(batch)
    for i in range(10):
        world.ask(f"{i}", behind(draw, modules[:: 1 if i % 2 else -1], 3))
    world.run()
    decode = next(plan for plan in reversed(plans) if plan.num_rows == 10)
    spans = sorted(decode.spans[edge.span].length for edge in decode.edges)
    assert spans[-2:] == [37, 301]
    assert len(spans) == 12, "each module once, and the own rows of each request"


# -- later -----------------------------------------------------------------------------------------------------


def test_a_later_turn_finds_the_modules_and_its_own_rows(ids_dir):
    draw = random.Random(9)
    one = module(draw, 30, 0, (4, 5))
    first = Prompt([one], draw_tokens(draw, 40), [4, 5, *range(30, 68)])
    world = World(Modules(ids_dir), page_size=16)
    world.one("1", first)
    more = first.tokens + world.tokens["1"] + draw_tokens(draw, 8)
    second = Prompt([one], more, [4, 5, *range(30, 28 + len(more))])
    world.ask("2", second)
    other = Prompt([one], more, [4, *range(30, 29 + len(more))])
    world.one("moved", other)
    world.check()
    assert world.cached("2") == 28 + 32, "the whole pages of its own rows"
    assert world.cached("moved") == 28, "at other positions they are other rows"


def test_own_rows_behind_other_modules_are_other_rows(ids_dir):
    draw = random.Random(21)
    first, second = (behind(draw, [module(draw, 16)], 40) for _ in range(2))
    second.tokens = first.tokens
    world = World(Modules(ids_dir))
    for i, prompt in enumerate([first, second, first]):
        world.one(f"{i}", prompt)
    world.check()
    assert [world.cached(f"{i}") for i in range(3)] == [0, 0, 16 + 32]


def test_a_module_whose_end_was_evicted_is_encoded_from_there(ids_dir):
    draw = random.Random(10)
    plain, with_hole = module(draw, 64), module(draw, 64, 64, (20,))
    world = World(Modules(ids_dir), page_size=16, pool_tokens=320)
    world.one("a", behind(draw, [plain, with_hole]))
    tree = world.core.cache.tree
    for node in [n for n in tree.nodes() if n.namespace.entry.startswith("module")]:
        world.core.cache.allocator.release(tree._evict(2, "room", iter([(node, len(node.pages))]).__next__))
    before = world.row_layers
    world.one("b", behind(draw, [plain, with_hole]))
    world.check()
    encoded = (64 - 32) + (64 - 16)  # the page in which the hole lies, and those behind it, need the placeholder
    assert world.row_layers - before == LAYERS * (encoded + 5 + NEW - 1)


def test_entries_are_found_by_content_not_by_name(ids_dir):
    """Other positions or placeholders make another entry of the same tokens; another name does not."""
    draw = random.Random(18)
    places = [list(range(20)), [*range(10), *range(15, 25)], list(range(20)), list(range(20))]
    holes = [[4], [4], [12], [4]]
    world = World(Modules(ids_dir))
    for i in range(4):
        one = Module(f"/{i}", [77] * 20, places[i], holes[i])
        world.one(f"{i}", Prompt([one], draw_tokens(draw, 3), [25, 26, 27]))
    world.check()
    assert [world.cached(f"{i}") for i in range(4)] == [0, 0, 0, 19]
    assert world.core.totals()["encoded_modules"] == 3


# -- pins ------------------------------------------------------------------------------------------------------


def pin(world: World, modules: list[Module], **fields) -> list[PinView]:
    asked = {"strategy": "chunks", "modules": [one.asked() for one in modules]}
    return call(world.core, AddPin(b"", ask=convert(asked, ReuseAsk), **fields))


def test_modules_are_encoded_ahead_and_pinned(ids_dir):
    draw = random.Random(15)
    modules = [module(draw, 40, 0, (5,), "/a"), module(draw, 16, 40, name="/b")]
    world = World(Modules(ids_dir), pool_tokens=640, pin_budget=0.5, page_size=16)
    world.one("before", behind(draw, modules[:1]))  # the first is there, and the second must be computed
    pins = pin(world, modules, ttl_s=60)
    assert sorted((one.name, one.tokens) for one in pins) == [("/a", 48), ("/b", 16)]
    with pytest.raises(PinRefused, match="all pins together"):
        pin(world, [module(draw, 160), module(draw, 160)])  # the first one alone would fit
    check_pins(world, pins, behind(draw, modules), 39 + 16)


def test_the_tree_names_modules_and_fills_up_their_last_page(ids_dir):
    draw = random.Random(16)
    one = module(draw, 20, 0, (3,), "/city/paris")
    world = World(Modules(ids_dir), page_size=16)
    world.one("a", behind(draw, [one]), reuse={"schema": "cities"})
    (node,) = call(world.core, GetTree(preview_tokens=64)).nodes
    assert node.meta == {"schema": "cities", "module": "/city/paris", "module_tokens": 19}
    assert array("i", node.preview).tolist() == [one.tokens[i] for i in one.kept] + [-1] * 13


# -- refusals ----------------------------------------------------------------------------------------------------


def entry(**fields) -> dict:
    tokens = array("i", [5] * 8).tobytes()
    return {"name": "/m", "tokens": tokens, "anchors": [[0, 0]], "holes": []} | fields


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"modules": [entry(tokens=array("i", [VOCAB]).tobytes())]}, "token outside"),
        ({"modules": [entry(tokens=array("i", [-1]).tobytes())]}, "token outside"),
        ({"modules": [entry(anchors=[[0, 1 << 62]])]}, "context"),
        ({"modules": [entry(anchors=[[0, 505]])]}, "context"),
        ({"modules": [entry(), entry(name="/n")]}, "twice"),
        ({"anchors": [[0, 508]]}, "context"),
    ],
)
def test_bad_fields_are_refused(ids_dir, asked, why):
    world = World(Modules(ids_dir))
    world.ask("a", Prompt([], [5, 6], [8, 9]), reuse=asked)
    assert world.finish["a"].refused
    assert why in world.finish["a"].message
    assert not world.core.requests
    world.check_idle()


def test_refusals_beside_the_fields(ids_dir):
    draw = random.Random(17)
    world = World(Modules(ids_dir), pool_tokens=160)
    world.ask("logprobs", behind(draw, [module(draw, 9)]), prompt_logprobs_from=0)
    world.ask("pages", behind(draw, [module(draw, 100)]), 100)
    world.ask("modules", behind(draw, [module(draw, 1) for _ in range(11)]), 1)
    world.ask("nothing", Prompt([module(draw, 9)], [], []), reuse={"anchors": []})
    assert [world.finish[rid].refused for rid in ("logprobs", "pages", "modules", "nothing")] == [True] * 4
    assert world.finish["modules"].message == "the prompt reads 11 entries; the KV pool has 10 pages"
    assert "KV pool has 10" in world.finish["pages"].message
    world.ask("placeholders alone", Prompt([module(draw, 9, 0, tuple(range(9)))], [5], [9]), 1)
    world.ask("no bound", behind(draw, [module(draw, 100)]), sampling={"max_new_tokens": None})
    world.run()
    assert len(world.tokens["no bound"]) == 160 - 112 - 5, "as many tokens as there are pages"
    assert world.cached("placeholders alone") == 0
    assert world.report("placeholders alone") == {"strategy": "modules", "exact": False, "exact_modules": True,
                                                  "modules": [],
                                                  "computed_modules": [], "reused_tokens": 0,
                                                  "computed_tokens": 1}  # fmt: skip


@pytest.mark.parametrize("gap", [0, 100])
def test_without_a_limit_the_answer_ends_with_the_context(ids_dir, gap):
    """Which counts positions, also those that no token has."""
    draw, world = random.Random(18), World(Modules(ids_dir))
    prompt = behind(draw, [module(draw, 30), module(draw, 20, 300 + gap, (4, 5))])
    world.one("a", prompt, sampling={"max_new_tokens": None})
    assert len(world.tokens["a"]) == world.core.info.context_length - (300 + gap + 20 + 5)
    assert world.finish["a"].type == "length"
    world.check(len(world.tokens["a"]))


def test_an_adapter_has_modules_of_its_own(ids_dir, tmp_path):
    """Encoded and read with its weights, beside those of the model, of which it reads none."""
    model = AutoModelForCausalLM.from_pretrained(ids_dir, dtype=torch.float32)
    adapter = save_lora(tmp_path / "adapter", model, seed=1)
    merged(model, adapter).save_pretrained(tmp_path / "merged")
    draw = random.Random(3)
    one, world = module(draw, 40), World(Modules(ids_dir), kernels="torch")
    digest = call(world.core, LoadAdapter(str(adapter))).digest
    prompts = [behind(draw, [one]) for _ in range(2)]
    for place in (Namespace(), Namespace(adapter=digest)):
        for i, prompt in enumerate(prompts):
            world.ask(f"{place.adapter}{i}", prompt, namespace=place)
        world.run()
        assert sorted(world.cached(f"{place.adapter}{i}") for i in range(2)) == [0, 40]
    for place, path in (("", ids_dir), (digest, tmp_path / "merged")):
        wanted = Reference(path)
        for i, prompt in enumerate(prompts):
            tokens = world.tokens[f"{place}{i}"]
            assert tokens == wanted.best(prompt, tokens)
    assert world.tokens["0"] != world.tokens[f"{digest}0"]
