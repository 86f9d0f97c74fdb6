"""The life of entries: computed once, shared, evicted, retracted, pinned; and what is refused."""

import random
from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from radix import Namespace
from runtime.calls import AddPin, GetPins, GetTree, LoadAdapter, RemovePin
from runtime.errors import PinRefused
from tests.lora import merged, save_lora
from tests.runtime.engine.driver import call
from tests.runtime.reuse.modules.plain import Module, ModuleDriver, Prompt, Reference, draw_tokens
from tests.tiny import VOCAB

LAYERS = 3
NEW = 4


@pytest.fixture(scope="module")
def reference(tiny_dir) -> Reference:
    return Reference(tiny_dir)


def module(draw: random.Random, length: int, at: int = 0, holes: tuple[int, ...] = (), name: str = "/m") -> Module:
    return Module(name, draw_tokens(draw, length), list(range(at, at + length)), list(holes))


def behind(draw: random.Random, modules: list[Module], length: int = 5) -> Prompt:
    """A prompt of modules and some tokens behind them."""
    at = max((m.positions[-1] + 1 for m in modules), default=0)
    return Prompt(modules, draw_tokens(draw, length), list(range(at, at + length)))


def check(driver: ModuleDriver, reference: Reference, count: int = NEW) -> None:
    """All requests gave the tokens of the reference."""
    for rid, prompt in driver.prompts.items():
        assert len(driver.tokens[rid]) == count
        assert driver.tokens[rid] == reference.best(prompt, driver.tokens[rid]), rid


def row_layers(driver: ModuleDriver) -> int:
    return driver.core.counters["row_layers"]


# -- what it equals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [{"kernels": "torch"}, {"kernels": "auto"}, {"model_impl": "transformers"}])
@pytest.mark.parametrize("page_size", [1, 16])
def test_many_short_modules_are_read_together(tiny_dir, reference, code, page_size):
    draw = random.Random(6)
    modules = [module(draw, draw.choice([1, 3, 16, 19]), at=10 * i, name=f"/{i}") for i in range(40)]
    driver = ModuleDriver(tiny_dir, page_size=page_size, **code)
    edges = []
    run = driver.core.executor.run
    driver.core.executor.run = lambda batch: (edges.append(len(batch.groups[0].attention.edges)), run(batch))[1]
    driver.ask("first", behind(draw, modules), NEW)
    driver.run()
    edges.clear()
    for rid, some in (("same", modules), ("turned", modules[::-1]), ("fewer", modules[:35]), ("few", modules[:3])):
        driver.ask(rid, behind(draw, some), NEW)
    driver.run()
    check(driver, reference)
    assert max(edges) <= 4 + 2 + 3, "own rows, those of all or all but five, and three alone"


# -- computed once -------------------------------------------------------------------------------------------


def test_two_requests_that_import_a_module_at_once_compute_it_once(tiny_dir, reference):
    draw = random.Random(4)
    shared, other = module(draw, 50, 3, (7, 8, 9)), module(draw, 20, 53)
    prompts = [behind(draw, [shared]), behind(draw, [shared, other]), behind(draw, [other, shared])]
    driver = ModuleDriver(tiny_dir, chunk_tokens=16, page_size=16)
    for i, prompt in enumerate(prompts):
        driver.ask(f"{i}", prompt, NEW)
    blocked, run = [], driver.core.executor.run
    driver.core.executor.run = lambda batch: blocked.append(driver.core.scheduler.num_blocked) or run(batch)
    driver.run()
    check(driver, reference)
    assert blocked[:4] == [2] * 4, "while the shared module is encoded, in four chunks"
    assert driver.core.counters["encoded_modules"] == 2
    assert row_layers(driver) == LAYERS * (50 + 20 + 3 * (5 + NEW - 1))
    assert [driver.cached(str(i)) for i in range(3)] == [0, 47, 67]
    first, last = (driver.results(str(i))[1] for i in (0, 2))
    assert first == {"strategy": "modules", "exact": True, "modules": ["/m"], "computed_modules": ["/m"],
                     "reused_tokens": 0, "computed_tokens": 52}  # fmt: skip
    assert last == {"strategy": "modules", "exact": True, "modules": ["/m"] * 2, "computed_modules": [],
                    "reused_tokens": 67, "computed_tokens": 5}  # fmt: skip
    assert driver.core.counters["prompt_tokens"] == driver.core.counters["queried_tokens"] == 52 + 72 + 72


def test_several_missing_modules_are_encoded_in_one_step(tiny_dir, reference):
    draw = random.Random(5)
    driver = ModuleDriver(tiny_dir, step_tokens=64)
    driver.ask("a", behind(draw, [module(draw, 10, 10 * i) for i in range(5)]), NEW)
    driver.step()
    assert driver.core.counters["encoded_modules"] == 5
    driver.run()
    check(driver, reference)
    assert driver.core.counters["steps"] == 1 + 1 + NEW - 1


def test_a_prompt_of_one_token_is_not_taken_for_decoding(tiny_dir, reference):
    draw = random.Random(6)
    driver = ModuleDriver(tiny_dir, overlap="on", step_tokens=32)
    driver.ask("a", behind(draw, [module(draw, 100)], 1), NEW)
    driver.run()
    check(driver, reference)
    assert driver.core.counters["steps"] == 4 + NEW


def test_pages_of_a_module_exist_once_for_many_requests(tiny_dir):
    draw = random.Random(7)
    modules = [module(draw, 40), module(draw, 33, 40)]
    driver = ModuleDriver(tiny_dir, page_size=16, max_running=16)
    for i in range(12):
        driver.ask(f"{i}", behind(draw, modules[:: 1 if i % 2 else -1]), 16)
    for _ in range(8):
        driver.step()
    assert len(driver.core.scheduler.running) == 12
    state = driver.core.state()
    assert state["pages_tree"] == 3 + 3
    assert state["pages_private"] == 12
    driver.run()


def test_equal_reads_become_one_edge_with_their_last_pages(tiny_dir):
    """Two modules whose last pages are used in part, in another order in each request."""
    draw = random.Random(8)
    modules = [module(draw, 301), module(draw, 37, 301)]
    plans = []
    driver = ModuleDriver(tiny_dir, page_size=16, pool_tokens=8192, max_running=16)
    run = driver.core.executor.run
    driver.core.executor.run = lambda batch: plans.append(batch.groups[0].attention) or run(batch)
    for i in range(10):
        driver.ask(f"{i}", behind(draw, modules[:: 1 if i % 2 else -1], 3), NEW)
    driver.run()
    decode = next(plan for plan in reversed(plans) if plan.num_rows == 10)
    spans = sorted(decode.spans[edge.span].length for edge in decode.edges)
    assert spans[-2:] == [37, 301]
    assert len(spans) == 12, "each module once, and the own rows of each request"


# -- later -----------------------------------------------------------------------------------------------------


def test_a_later_turn_finds_the_modules_and_its_own_rows(tiny_dir, reference):
    draw = random.Random(9)
    one = module(draw, 30, 0, (4, 5))
    first = Prompt([one], draw_tokens(draw, 40), [4, 5, *range(30, 68)])
    driver = ModuleDriver(tiny_dir, page_size=16)
    driver.ask("1", first, NEW)
    driver.run()
    more = first.tokens + driver.tokens["1"] + draw_tokens(draw, 8)
    second = Prompt([one], more, [4, 5, *range(30, 28 + len(more))])
    driver.ask("2", second, NEW)
    other = Prompt([one], more, [4, *range(30, 29 + len(more))])
    driver.ask("moved", other, NEW)
    driver.run()
    check(driver, reference)
    assert driver.cached("2") == 28 + 32, "the whole pages of its own rows"
    assert driver.cached("moved") == 28, "at other positions they are other rows"


def test_own_rows_behind_other_modules_are_other_rows(tiny_dir, reference):
    draw = random.Random(21)
    first, second = (behind(draw, [module(draw, 16)], 40) for _ in range(2))
    second.tokens = first.tokens
    driver = ModuleDriver(tiny_dir)
    for i, prompt in enumerate([first, second, first]):
        driver.ask(f"{i}", prompt, NEW)
        driver.run()
    check(driver, reference)
    assert [driver.cached(f"{i}") for i in range(3)] == [0, 0, 16 + 32]


def test_a_module_whose_end_was_evicted_is_encoded_from_there(tiny_dir, reference):
    draw = random.Random(10)
    plain, with_hole = module(draw, 64), module(draw, 64, 64, (20,))
    driver = ModuleDriver(tiny_dir, page_size=16, pool_tokens=320)
    driver.ask("a", behind(draw, [plain, with_hole]), NEW)
    driver.run()
    tree = driver.core.cache.tree
    for node in [n for n in tree.nodes() if n.namespace.entry.startswith("module")]:
        driver.core.cache.allocator.release(tree._evict(2, "room", iter([(node, len(node.pages))]).__next__))
    before = row_layers(driver)
    driver.ask("b", behind(draw, [plain, with_hole]), NEW)
    driver.run()
    check(driver, reference)
    encoded = (64 - 32) + (64 - 16)  # the page in which the hole lies, and those behind it, need the placeholder
    assert row_layers(driver) - before == LAYERS * (encoded + 5 + NEW - 1)


def test_entries_are_found_by_content_not_by_name(tiny_dir, reference):
    """Other positions or placeholders make another entry of the same tokens; another name does not."""
    draw = random.Random(18)
    places = [list(range(20)), [*range(10), *range(15, 25)], list(range(20)), list(range(20))]
    holes = [[4], [4], [12], [4]]
    driver = ModuleDriver(tiny_dir)
    for i in range(4):
        one = Module(f"/{i}", [77] * 20, places[i], holes[i])
        driver.ask(f"{i}", Prompt([one], draw_tokens(draw, 3), [25, 26, 27]), NEW)
        driver.run()
    check(driver, reference)
    assert [driver.cached(f"{i}") for i in range(4)] == [0, 0, 0, 19]
    assert driver.core.counters["encoded_modules"] == 3


# -- pins ------------------------------------------------------------------------------------------------------


def pin(driver: ModuleDriver, modules: list[Module], **fields) -> dict:
    asked = {"method": "modules", "entries": [one.asked() for one in modules]}
    return call(driver.core, AddPin(b"", reuse=asked, **fields))


def test_modules_are_encoded_ahead_and_pinned(tiny_dir, reference):
    draw = random.Random(15)
    modules = [module(draw, 40, 0, (5,), "/a"), module(draw, 16, 40, name="/b")]
    driver = ModuleDriver(tiny_dir, pool_tokens=640, pin_budget=0.5, page_size=16)
    driver.ask("before", behind(draw, modules[:1]), NEW)  # the first is there, and the second must be computed
    driver.run()
    pins = pin(driver, modules, ttl_s=60)["pins"]
    assert sorted((one["name"], one["tokens"]) for one in pins) == [("/a", 48), ("/b", 16)]
    driver.flush()
    for i in range(12):
        driver.add(f"flood {i}", draw_tokens(draw, 60), max_new_tokens=2)
    driver.run()
    driver.ask("a", behind(draw, modules), NEW)
    driver.run()
    check(driver, reference)
    assert driver.cached("a") == 39 + 16
    with pytest.raises(PinRefused, match="all pins together"):
        pin(driver, [module(draw, 400)])
    with pytest.raises(PinRefused, match="no reuse method"):
        call(driver.core, AddPin(b"", reuse={"method": "x"}))
    assert len(call(driver.core, GetPins())["pins"]) == 2, "nothing of a refused call stays"
    for one in pins:
        assert call(driver.core, RemovePin(one["id"]))["found"]
    assert driver.flush()["live_tokens"] == 0


def test_the_tree_names_modules_and_fills_up_their_last_page(tiny_dir):
    draw = random.Random(16)
    one = module(draw, 20, 0, (3,), "/city/paris")
    driver = ModuleDriver(tiny_dir, page_size=16)
    driver.ask("a", behind(draw, [one]), NEW, asked={"schema": "cities"})
    driver.run()
    (node,) = call(driver.core, GetTree(preview_tokens=64))["nodes"]
    assert node["meta"] == {"schema": "cities", "module": "/city/paris", "module_tokens": 19}
    assert array("i", node["preview"]).tolist() == [one.tokens[i] for i in one.kept] + [-1] * 13


# -- refusals ----------------------------------------------------------------------------------------------------


def entry(**fields) -> dict:
    tokens = array("i", [5] * 8).tobytes()
    return {"name": "/m", "tokens": tokens, "anchors": [[0, 0]], "holes": []} | fields


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"entries": "all"}, "entries"),
        ({"entries": [{"tokens": b""}]}, "anchors"),
        ({"entries": [entry(tokens=array("i", [VOCAB]).tobytes())]}, "token outside"),
        ({"entries": [entry(tokens=array("i", [-1]).tobytes())]}, "token outside"),
        ({"entries": [entry(anchors=[[0, 1 << 62]])]}, "context"),
        ({"entries": [entry(anchors=[[0, 505]])]}, "context"),
        ({"entries": [entry(), entry(name="/n")]}, "twice"),
        ({"anchors": [[0, 508]]}, "context"),
        ({"anchors": [[0, "x"]]}, "anchors"),
        ({"method": ["modules"]}, "no reuse method"),
    ],
)
def test_bad_fields_are_refused(tiny_dir, asked, why):
    driver = ModuleDriver(tiny_dir)
    driver.ask("a", Prompt([], [5, 6], [8, 9]), NEW, asked=asked)
    assert driver.finish["a"].refused
    assert why in driver.finish["a"].message
    assert not driver.core.requests
    driver.check_idle()


def test_refusals_beside_the_fields(tiny_dir):
    draw = random.Random(17)
    driver = ModuleDriver(tiny_dir, pool_tokens=160)
    driver.ask("logprobs", behind(draw, [module(draw, 9)]), NEW, prompt_logprobs_from=0)
    driver.ask("pages", behind(draw, [module(draw, 100)]), 100)
    driver.ask("modules", behind(draw, [module(draw, 1) for _ in range(11)]), 1)
    driver.ask("nothing", Prompt([module(draw, 9)], [], []), NEW, asked={"anchors": []})
    assert [driver.finish[rid].refused for rid in ("logprobs", "pages", "modules", "nothing")] == [True] * 4
    assert driver.finish["modules"].message == "the prompt reads 11 entries; the KV pool has 10 pages"
    assert "KV pool has 10" in driver.finish["pages"].message
    driver.ask("placeholders alone", Prompt([module(draw, 9, 0, tuple(range(9)))], [5], [9]), 1)
    driver.ask("no bound", behind(draw, [module(draw, 100)]), sampling={"max_new_tokens": None})
    driver.run()
    assert len(driver.tokens["no bound"]) == 160 - 112 - 5, "as many tokens as there are pages"
    assert driver.results("placeholders alone") == (
        0,
        {
            "strategy": "modules",
            "exact": True,
            "modules": [],
            "computed_modules": [],
            "reused_tokens": 0,
            "computed_tokens": 1,
        },
    )


def test_an_adapter_has_modules_of_its_own(tiny_dir, tmp_path):
    """Encoded and read with its weights, beside those of the model, of which it reads none."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    adapter = save_lora(tmp_path / "adapter", model, seed=1)
    merged(model, adapter).save_pretrained(tmp_path / "merged")
    draw = random.Random(3)
    one, driver = module(draw, 40), ModuleDriver(tiny_dir, kernels="torch")
    digest = call(driver.core, LoadAdapter(str(adapter)))["digest"]
    prompts = [behind(draw, [one]) for _ in range(2)]
    for place in (Namespace(), Namespace(adapter=digest)):
        for i, prompt in enumerate(prompts):
            driver.ask(f"{place.adapter}{i}", prompt, NEW, namespace=place)
        driver.run()
        assert sorted(driver.results(f"{place.adapter}{i}")[0] for i in range(2)) == [0, 40]
    for place, path in (("", tiny_dir), (digest, tmp_path / "merged")):
        wanted = Reference(path)
        for i, prompt in enumerate(prompts):
            tokens = driver.tokens[f"{place}{i}"]
            assert tokens == wanted.best(prompt, tokens)
    assert driver.tokens["0"] != driver.tokens[f"{digest}0"]
