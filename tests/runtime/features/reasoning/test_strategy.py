"""Limits of sharing, its truth, and what a shared page means."""

from array import array
from collections import Counter

import pytest

from loadgen.offline.forced import Forcing
from radix import Namespace
from runtime.errors import ModelError
from runtime.features.drafts.part import Drafts
from tests.runtime.engine.driver import make_core
from tests.runtime.features.diffusion.bicache.models import save_tiny
from tests.runtime.features.reasoning.driver import ANY, PAGE, ReasonDriver, load_tokenizer

PROMPT = [5, 6, 7, 8, 9, 10]
LONG = 100


def shared(driver: ReasonDriver, rid: str) -> int:
    """References to pages of a live request beyond their first."""
    pages = driver.requests[rid].sequence.pages
    return len(pages) - len(set(pages))


def cached(driver: ReasonDriver, tokens: list[int]) -> int:
    """Tokens of a sequence that lie in the tree."""
    request = driver.requests["r"]
    request.sequence.tokens[:] = array("i", tokens)
    return len(driver.core.cache.tree.match(request.key(len(tokens)), Namespace()).pages) * PAGE


def sources(driver: ReasonDriver) -> list[tuple[int, int]]:
    """Substituted pages: the index of each, and the other's."""
    found: list[tuple[int, int]] = []

    def watch(lease, substitute, index, source):
        found.append((index, source))
        substitute(index, source)

    driver.watch("substitute", watch)
    return found


# -- limits ------------------------------------------------------------------------------------------------------


def test_a_threshold_of_one_shares_nothing(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    strict = {"percentile": 100, "tau_max": 1, "tau_min": 1}
    # A loop, too, in which steps are equal.
    for kind, options in (("drawn", {}), ("greedy", {"temperature": 0})):
        driver.think(f"strict {kind}", PROMPT, LONG, strict, **options)
        driver.plain(kind, PROMPT, LONG, **options)
    driver.run()
    for kind in ("drawn", "greedy"):
        rid = f"strict {kind}"
        assert driver.tokens[rid] == driver.tokens[kind]
        assert driver.report(rid)["approximate"] is False
        assert driver.report(rid)["substituted_pages"] == 0
    assert driver.core.totals()["substituted_pages"] == 0


def test_percentile_100_leaves_the_decision_to_the_filters(tiny_dir):
    driver = ReasonDriver(tiny_dir, warm_up=1 << 20)
    seen = []
    driver.watch("consider", lambda lease, consider, match: (seen.append(match), consider(match)))
    driver.think("r", PROMPT, LONG, ANY)
    driver.run()
    assert len(seen) > 5
    assert driver.core.totals()["substituted_pages"] == len(seen) == driver.report("r")["substituted_pages"]


def test_distances_decide_behind_the_warm_up(tiny_dir):
    warm_up = 6
    driver = ReasonDriver(tiny_dir, warm_up=warm_up)
    decisions = []

    def watch(lease, consider, match):
        before, known = driver.core.totals()["substituted_pages"], sorted(driver.strategy.reservoir._sorted)
        consider(match)
        decisions.append((match.distance, known, driver.core.totals()["substituted_pages"] - before))

    driver.watch("consider", watch)
    driver.think("r", PROMPT, 2 * LONG, ANY | {"percentile": 50})
    driver.run()
    for distance, known, was_shared in decisions:
        below = sum(one < distance for one in known) / max(len(known), 1)
        assert was_shared == (len(known) >= warm_up and below <= 0.5) or abs(below - 0.5) <= 1 / len(known)
    late = [was_shared for _, _, was_shared in decisions[warm_up:]]
    assert 0.2 < sum(late) / len(late) < 0.8


@pytest.mark.parametrize(("sign", "may_share"), [("-", {(2, 0)}), ("+", {(1, 0), (2, 0), (2, 1)})])
def test_equal_words_with_another_formula_are_not_shared(tiny_dir, sign, may_share):
    driver = ReasonDriver(tiny_dir)
    found = sources(driver)
    text = "".join(f"So we see that 2x{one}5 is the first of all that we know.\n\n" for one in ("+", sign, "+"))
    said = load_tokenizer(tiny_dir).encode(f"{text}So we go on.", add_special_tokens=False)
    driver.core.decoding = forcing = Forcing(driver.core.decoding, lambda *_: None)
    forcing.answers["r"] = said
    driver.think("r", PROMPT, len(said), {"percentile": 100}, logit_bias={})
    driver.step()
    history = driver.requests["r"].lease.reasoning.history
    driver.run()
    assert driver.tokens["r"] == said
    steps = history.steps
    assert "".join(one.text for one in steps) == text

    def step_of(place: int) -> int:
        return next(i for i, one in enumerate(steps) if PAGE * place - len(PROMPT) < one.end)

    shared_steps = {(step_of(place), step_of(source)) for place, source in found}
    assert shared_steps
    assert shared_steps <= may_share


# -- pages -------------------------------------------------------------------------------------------------------


def test_pages_are_freed_when_they_are_shared(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    driver.think("r", PROMPT, LONG, ANY)
    allocator = driver.core.cache.allocator
    most = 0
    while driver.core.busy:
        driver.step()
        if "r" in driver.core.requests:
            pages = driver.requests["r"].sequence.pages
            state = driver.core.state()
            assert state["saved_pages"] == shared(driver, "r")
            assert state["pages_free"] == allocator.num_pages - len(set(pages)) - driver.core.cache.tree.num_pages
            assert dict(Counter(pages)) == {page: allocator.refs[page] for page in pages}
            most = max(most, shared(driver, "r"))
    report = driver.report("r")
    assert most == report["substituted_pages"] > 5
    assert report["amsr"] == pytest.approx(most / -(-(len(PROMPT) + LONG) // PAGE), abs=1e-4)
    assert driver.core.state()["saved_pages"] == 0
    driver.check_idle()


def test_neither_the_prompt_nor_the_tail_is_shared(tiny_dir):
    """Not even a prompt that is made of the output's own steps."""
    driver = ReasonDriver(tiny_dir, prefix_cache=False)
    driver.plain("before", PROMPT, LONG)
    driver.run()
    prompt = PROMPT + driver.tokens["before"] + [7] * 3
    driver.think("r", prompt, LONG, ANY)
    first = -(-len(prompt) // PAGE)
    while driver.core.busy:
        driver.step()
        if "r" in driver.core.requests and driver.requests["r"].lease.reasoning.history:
            pages = driver.requests["r"].sequence.pages
            assert len(set(pages[:first])) == first
            assert not set(pages[:first]) & set(pages[first:])
            assert pages.count(pages[-1]) == 1
            assert all(first <= place < len(pages) - 1 for place in driver.requests["r"].lease.reasoning.substituted)
    assert driver.report("r")["substituted_pages"] > 5


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_shared_page_reads_as_a_copy(tiny_dir, kernels):
    logprobs = []
    for is_shared in (True, False):
        driver = ReasonDriver(tiny_dir, kernels=kernels)
        driver.think("r", PROMPT, 60, {"percentile": 1, "tau_max": 1, "tau_min": 1}, logit_bias={}, temperature=0)
        request = driver.requests["r"]
        request.message.logprobs = 0
        while request.num_output < 40:
            driver.step()
        for index, source in ((5, 3), (8, 2), (9, 3), (7, 5)):
            if is_shared:
                request.lease.substitute(index, source)
            else:
                _copy(driver, request.sequence.pages, index, source)
        driver.run()
        logprobs.append([one.logprob for event in driver.events["r"] for one in event.logprobs])
        if is_shared:
            assert driver.report("r")["substituted_pages"] == 4
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def _copy(driver: ReasonDriver, pages, index: int, source: int) -> None:
    # Nothing of this prompt lies in the tree but its first page.
    first = driver.requests["r"].sequence.start // PAGE
    pool = driver.core.cache.pool
    into, out_of = (slice(pages[at - first] * PAGE, (pages[at - first] + 1) * PAGE) for at in (index, source))
    for tensor in (pool.k, pool.v):
        tensor[:, into] = tensor[:, out_of]


# -- truth -------------------------------------------------------------------------------------------------------


def test_nothing_approximate_is_committed(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    driver.think("r", PROMPT, LONG, ANY)
    driver.run()
    report, tokens = driver.report("r"), PROMPT + driver.tokens["r"]
    assert report["approximate"]
    assert 0 < report["first_substituted_token"] < report["exact_tokens"] < LONG
    # Whole pages before the first substituted one are kept, and are exact.
    found = cached(driver, tokens)
    assert found == len(PROMPT) + report["first_substituted_token"]
    later = tokens[: len(tokens) - 7]
    driver.add("later", later, max_new_tokens=8, logprobs=0)
    cold = ReasonDriver(tiny_dir, prefix_cache=False)
    cold.add("later", later, max_new_tokens=8, logprobs=0)
    for one in (driver, cold):
        one.run()
    assert driver.cached("later") >= found
    assert driver.tokens["later"] == cold.tokens["later"]
    for mine, theirs in zip(driver.events["later"], cold.events["later"], strict=True):
        assert mine.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=1e-4)


def test_tokens_before_the_first_substitution_are_exact(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    driver.think("r", PROMPT, LONG, ANY)
    driver.plain("plain", PROMPT, LONG)
    driver.run()
    exact = driver.report("r")["exact_tokens"]
    assert driver.tokens["r"][:exact] == driver.tokens["plain"][:exact]
    assert driver.tokens["r"] != driver.tokens["plain"]


def test_steps_of_several_tokens_are_evaluated_too(tiny_dir):
    """Drafts are right as long as an output is that of the request before."""
    driver = ReasonDriver(tiny_dir, drafts="auto")
    driver.plain("plain", PROMPT, LONG)
    driver.run()
    drafter = driver.core.part(Drafts).drafter

    def propose(requests, room, beside):
        for request in requests:
            drafter._find(request)  # makes the state of its books
        return {r: array("i", driver.tokens["plain"][r.num_output : r.num_output + 3]) for r in requests[:1]}

    drafter.propose = propose
    driver.think("r", PROMPT, LONG, ANY)
    driver.run()
    report = driver.report("r")
    assert driver.core.counters["accepted_tokens"] > 20
    assert report["substituted_pages"] > 5
    exact = report["exact_tokens"]
    assert driver.tokens["r"][:exact] == driver.tokens["plain"][:exact]


def test_a_retracted_request_is_computed_again_and_shares_again(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    driver.think("r", PROMPT, LONG, ANY, seed=2)  # a text whose steps repeat soon
    request = driver.requests["r"]
    while not shared(driver, "r"):
        driver.step()
    num_output = request.num_output
    first = driver.report("r")["first_substituted_token"]
    driver.core.scheduler._retract(request)
    driver.core.cache.check([])
    found = sources(driver)
    driver.step()
    report = driver.report("r")
    assert (report["recomputed"], report["substituted_pages"], report["approximate"]) == (1, 0, True)
    # What was exact before lies in the tree, and what is computed again stays the request's own.
    assert request.sequence.start == (len(PROMPT) + first) // PAGE * PAGE
    while not request.lease.reasoning.substituted:
        driver.step()
    assert request.num_output <= num_output + 2 * PAGE, "the same steps again"
    # Pages of the tree are read in later places, too, and never given up.
    in_tree = request.sequence.start // PAGE
    assert any(source < in_tree for _, source in found)
    assert all(index >= in_tree for index, _ in found)
    driver.run()
    assert len(driver.tokens["r"]) == LONG
    assert driver.report("r")["exact_tokens"] <= num_output
    driver.check_idle()


# -- refusals ----------------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_refused(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    driver.think("r", PROMPT, 4, {}, prompt_logprobs_from=0)
    assert driver.finish["r"].type == "error"
    assert driver.finish["r"].refused
    driver.check_idle()


def test_an_engine_of_a_diffusion_model_has_none(tiny_dir, tmp_path, default_model_dir):
    path = save_tiny("llada", tmp_path / "llada", layers=1)
    with pytest.raises(ModelError, match=r"--reuse reasoncache: .* is a diffusion model"):
        make_core(path, reuse="reasoncache")
    with pytest.raises(ModelError, match="several ranks"):
        make_core(tiny_dir, reuse="reasoncache", tensor_parallel=2)


def test_several_ranks_are_refused(tiny_dir):
    driver = ReasonDriver(tiny_dir)
    driver.strategy._has_all_heads = False
    driver.think("r", PROMPT, 4, {})
    assert driver.finish["r"].refused
