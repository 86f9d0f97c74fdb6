"""The sampling parameters of a body: prepared once and sent once, however many prompts and choices it has."""

import asyncio

import pytest

from runtime.config import Config, SchedulerConfig
from runtime.errors import Overloaded
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.params import SamplingParams
from runtime.protocol import AddRequest, ModelInfo, Sampling, encode
from tests.runtime.frontend.test_limits import FewTokens
from tests.runtime.frontend.test_request_ids import INFO


class Counting:
    """A tokenizer that counts the texts of `encode_each`."""

    def __init__(self, tokenizer):
        self._tokenizer, self.texts = tokenizer, 0

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def encode_each(self, texts: list[str]) -> list[list[int]]:
        self.texts += len(texts)
        return self._tokenizer.encode_each(texts)


def opened(
    tokenizer, submissions: list[Submission], config: SchedulerConfig | None = None, info: ModelInfo = INFO
) -> list:
    """The messages to the engine."""
    engine, sent = AsyncEngine(Config()), []
    engine.tokenizer = tokenizer
    engine._frontend = OutputProcessor(InputProcessor(info, tokenizer, config or SchedulerConfig()), sent.append)

    async def main() -> None:
        await engine.open(submissions)

    asyncio.run(main())
    return sent


def test_prompts_and_choices_share_what_is_large(tokenizer):
    params = SamplingParams(
        n=8, allowed_token_ids=[*range(40_000)], bad_words=[f"word{i}" for i in range(20)], seed=3, max_new_tokens=None
    )
    counting = Counting(tokenizer)
    sent = opened(counting, [Submission([i], params) for i in range(20)])
    assert counting.texts == 40, "each word once, and once behind a space"
    common, *others = sent
    assert isinstance(common, Sampling)
    assert len(others) == 160
    assert sum(len(encode(message)) for message in others) < 160 * 400
    for message in (sent[1], sent[-1]):
        whole = common.complete(message)
        assert isinstance(whole, AddRequest)
        assert whole.sampling.allowed_token_ids is common.params.allowed_token_ids
        assert whole.bad_words is common.bad_words
    assert [sent[i].limits.seed for i in (1, 8)] == [3, 10]


def test_other_parameters_are_sent_anew(tokenizer):
    one, other = SamplingParams(seed=1), SamplingParams(bad_words=["tree"])
    sent = opened(tokenizer, [Submission([1], params) for params in (one, other, one)])
    kinds = [type(message).__name__ for message in sent]
    assert kinds == ["Sampling", "AddRequest"] * 3
    assert [bool(message.bad_words) for message in sent[::2]] == [False, True, False]


def test_prompts_that_grow_beyond_what_may_wait_are_refused_before_all_are_made(tokenizer):
    made = []

    def make() -> list[int]:
        made.append(1)
        return [1] * 40

    with pytest.raises(Overloaded, match="more than 100 tokens"):
        opened(tokenizer, [Submission(make) for _ in range(20)], FewTokens())
    assert len(made) == 3
