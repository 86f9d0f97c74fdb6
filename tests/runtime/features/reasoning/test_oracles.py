"""The engine's ReasonCache against the plain reading of the paper."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.offline.forced import Forcing
from runtime.features.reasoning.steps import Splitter, similarity, threshold
from runtime.features.reasoning.strategy import ReasoningLease
from runtime.features.reasoning.structure import equivalent
from runtime.models.tokenizer import Tokenizer
from tests.runtime.features.reasoning import reference as plain
from tests.runtime.features.reasoning.driver import ReasonDriver, words
from tests.runtime.features.reasoning.reference import Reference, Rules, Shared
from tests.runtime.reuse.modules.plain import draw_tokens
from tests.tiny import save_tiny

CLOSE = 2e-3  # of logits: float32, in another order
WARM_UP = 8

TEXTS = st.lists(
    st.sampled_from(["a", " b", "c.", "\n", "\n\n", "d\n", "\n\ne", " ", "\n \n", "f\n\n\ng", ""]), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, data=st.data())
def test_steps_scores_and_thresholds(texts, data):
    ids = [data.draw(st.integers(0, 4)) for _ in texts]
    splitter = Splitter()
    found = [step for step in map(splitter.push, ids, texts) if step is not None]
    expected = plain.steps(ids, texts)
    assert [(one.start, one.end, one.text) for one in found] == [(one.start, one.stop, one.text) for one in expected]
    for i in range(1, len(found)):
        scores = [similarity(found[i], found[j]) for j in range(i)]
        assert scores == pytest.approx([plain.score(expected[i], expected[j]) for j in range(i)])
        assert threshold(scores, 0.9, 0.6) == pytest.approx(plain.threshold(scores, 0.9, 0.6))


class ForcedDriver(ReasonDriver):
    """Requests with given outputs, the logits of each token, and what was shared when.

    Attributes:
        logits: float32 [vocab] of each token of the output, by request.
        shared: by request, in order.
    """

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, warm_up=WARM_UP, **options)
        self.core.decoding = self.forcing = Forcing(self.core.decoding, self._keep)
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.shared: dict[str, list[Shared]] = {}
        self.watch("substitute", self._note)

    def force(self, rid: str, prompt: list[int], output: list[int], reuse: dict[str, Any], more: int = 0) -> None:
        """Let a request say an output, and `more` tokens of its own."""
        self.forcing.answers[rid], self.logits[rid], self.shared[rid] = output, [], []
        self.think(rid, prompt, len(output) + more, reuse, temperature=0, logit_bias={})

    def _keep(self, rid: str, number: int, logits: torch.Tensor) -> None:
        assert number == len(self.logits[rid])
        self.logits[rid].append(logits.clone())

    def _note(self, lease: ReasoningLease, substitute: Any, index: int, source: int) -> None:
        request, before = lease.request, self.strategy.counters["substituted_pages"]
        substitute(index, source)
        if self.strategy.counters["substituted_pages"] > before:
            # The token whose logits came last is not computed yet; nor are those of the driver's other requests.
            rows = request.prompt_len + len(self.logits[request.rid]) - 1
            self.shared[request.rid].append(Shared(rows, index, source))


def repetitive(draw: random.Random, tokenizer: Tokenizer, count: int, longest: int = 20) -> list[int]:
    """Steps of a few words, most of which say again, with another word here and there, what was said."""
    delimiter = tokenizer.encode("\n\n", add_special_tokens=False)
    said = [token for token in words(tokenizer) if token not in delimiter]
    steps: list[list[int]] = []
    for _ in range(count):
        if steps and draw.random() < 0.7:
            new = [draw.choice(said) if draw.random() < 0.04 else token for token in draw.choice(steps)]
        else:
            new = [draw.choice(said) for _ in range(draw.randrange(4, longest))]
        steps.append(new)
    return [token for step in steps for token in (*step, *delimiter)]


@pytest.mark.parametrize(
    ("kind", "page_size", "options"),
    [
        ("llama", 4, {"overlap": "on"}),
        ("llama_yarn", 2, {"kernels": "torch", "step_tokens": 7}),
        ("qwen3", 4, {}),
    ],
)
def test_whole_outputs(tmp_path, default_model_dir, tokenizer, kind, page_size, options):
    """The same pages are shared at the same moments, and the logits behind them are the same, request by request."""
    path = save_tiny(kind, tmp_path, default_model_dir)
    driver, model, measured = ForcedDriver(path, page_size=page_size, **options), Reference(path), []
    late = 2 if options.get("overlap") else 1  # a step in flight reads what it began with
    draw = random.Random(f"{kind} 2")
    for percentile in (90, 100):
        rid, fields = f"{percentile}", {"percentile": percentile}
        # The last step stays open, so that nothing is shared any more behind the output.
        steps, end = repetitive(draw, tokenizer, 8, 8 + 3 * page_size), words(tokenizer)[-10:]
        prompt, output = draw_tokens(draw, draw.randrange(5, 20)), steps + end
        driver.force(rid, prompt, output, fields, more=4)
        driver.run()
        texts, said = [tokenizer.token_text(token) for token in output], driver.tokens[rid]
        rules = Rules(page_size, percentile, warm_up=WARM_UP, late=late)
        shared, expected = model.serve(prompt, said, [*texts, *[" so"] * 4], rules, equivalent, measured)
        assert driver.shared[rid] == shared
        assert len(shared) > (3 if percentile == 100 else 0)
        found = torch.stack(driver.logits[rid])
        assert (found - expected[: len(output)]).abs().max() < CLOSE
        behind = expected[len(output) : -1].amax(1) - expected[range(len(output), len(said)), said[len(output) :]]
        assert behind.max() < CLOSE, "its own tokens are the likeliest"
        saved = plain.distinct_share(len(prompt) + len(said), page_size, shared)
        assert driver.report(rid)["amsr"] == pytest.approx(saved, abs=1e-3)
    exact = model.run(prompt, said, page_size)
    assert (exact - expected).abs().max() > 10 * CLOSE


def test_batches(tiny_dir, tokenizer):
    """Requests that share pages beside one another and beside exact ones: the logits of what was shared in each."""
    driver, model, draw = ForcedDriver(tiny_dir, page_size=4), Reference(tiny_dir), random.Random("stale 4")
    asked = {}
    for number in range(4):
        prompt, output = draw_tokens(draw, draw.randrange(5, 20)), repetitive(draw, tokenizer, 8)
        asked[f"{number}"] = prompt, output
        taus = {} if number % 2 else {"tau_max": 1, "tau_min": 1}
        driver.force(f"{number}", prompt, output, {"percentile": 100, **taus})
        for _ in range(draw.randrange(6)):
            driver.step()
    driver.run()
    for rid, (prompt, output) in asked.items():
        shared = driver.shared[rid]
        assert len(shared) > 3 if rid in "13" else not shared
        expected = model.run(prompt, output[:-1], 4, shared)
        assert (torch.stack(driver.logits[rid]) - expected).abs().max() < CLOSE
