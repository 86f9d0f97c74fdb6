"""Ramet as a library, on the real model."""

import asyncio
from collections.abc import Callable

import pytest

from runtime import Document, Engine, ReuseParams, SamplingParams, Segments, Submission
from runtime.errors import EngineDead, InvalidRequest, ModelError


@pytest.fixture(scope="module")
def engine(default_model_dir):
    with Engine(str(default_model_dir), dtype="float32", pool_tokens=4096) as engine:
        yield engine


GREEDY = {"temperature": 0, "max_new_tokens": 6}


def test_one_and_several_prompts(engine):
    (one,) = engine.generate("The capital of France is", GREEDY)
    assert one.text.startswith(" Paris")
    assert one.finish.type == "length"
    ids = engine.tokenizer.encode("The capital of France is")
    several = engine.generate(["The capital of France is", "Once upon"], [GREEDY, SamplingParams(**GREEDY)])
    assert [output.index for output in several] == [0, 1]
    assert several[0].text == one.text
    assert engine.generate([ids], GREEDY)[0].token_ids == one.token_ids


def test_modules_of_a_schema_are_read_from_the_cache(engine):
    schema = engine.schema(
        "<schema name='cities'>Cities.<module name='paris'> Paris is the capital of France.</module></schema>"
    )
    prompt = schema.compile("<prompt schema='cities'><paris/> The capital of France is</prompt>")
    first, second = (engine.generate(prompt, GREEDY)[0] for _ in range(2))
    (plain,) = engine.generate("Cities. Paris is the capital of France. The capital of France is", GREEDY)
    assert first.text == second.text
    assert first.prompt_tokens == second.prompt_tokens == plain.prompt_tokens
    assert second.cached_tokens == second.reuse.reused_tokens == sum(prompt.rows)
    assert engine.generate([prompt, "Once"], GREEDY)[0].text == first.text
    stopped = engine.generate(prompt, {**GREEDY, "max_new_tokens": 9000, "stop": [first.text[-3:]]})[0]
    assert stopped.finish.type == "stop", "as many tokens as there is room for were allowed"


def test_documents_are_read_from_the_cache(engine):
    paris = Document(" Paris is the capital of France." * 12, "Paris")  # shorter documents are computed in full
    texts = [f"{paris.content}", " The capital of France is"]
    ids = [token for text in texts for token in engine.tokenizer.encode(text)]
    (plain,) = engine.generate([ids], GREEDY)
    prompt = Segments([paris, texts[1]])
    for reuse in (None, {"method": "none"}, ReuseParams(method="pie"), {"method": "a3", "ratio": 1}):
        (answer,) = engine.generate(prompt, GREEDY, reuse)
        assert answer.token_ids == plain.token_ids
        assert answer.prompt_tokens == len(ids)
        method = "none" if reuse is None else ReuseParams.model_validate(reuse).method
        assert (answer.reuse.method, answer.reuse.documents) == (method, ["Paris"])
    several = engine.generate([prompt, Segments(["So: ", *prompt.parts])], GREEDY, {"method": "pie"})
    assert [output.reuse.computed_documents for output in several] == [[], []]
    assert list(engine.stream(prompt, GREEDY, {"method": "pie"}))[-1].token_ids == plain.token_ids
    with pytest.raises(InvalidRequest, match="this one has none"):
        engine.generate("Once", GREEDY, {"method": "pie"})
    with pytest.raises(InvalidRequest, match="k is an option of legolink"):
        engine.generate(prompt, GREEDY, {"method": "pie", "k": 2})


def test_a_method_for_documents_can_be_the_default(tiny_dir):
    prompt = Segments([Document("Rome is old. " * 30), " Why?"])
    with Engine(str(tiny_dir), dtype="float32", pool_tokens=1024, reuse="pie") as engine:
        answers = [engine.generate(prompt, GREEDY, reuse)[0] for reuse in (None, {"method": "none"})]
        assert [answer.reuse.method for answer in answers] == ["pie", "none"]
        assert answers[0].token_ids == answers[1].token_ids
        assert engine.generate("Once", GREEDY)[0].reuse is None
        scored = Submission(prompt, SamplingParams(**GREEDY), prompt_logprobs_from=0)
        *_, last = engine.stream_all([scored])
        assert last.reuse.method == "none"


def test_log_probabilities(engine):
    """Those of the last Output are of all tokens, and those of a stream of each new one."""
    wanted = {"logprobs": 2, "prompt_logprobs_from": 1}
    (output,) = engine.generate("Once upon a time", GREEDY, **wanted)
    assert [one.token for one in output.logprobs] == output.token_ids
    assert [one.top[0][0] for one in output.logprobs] == output.token_ids
    assert all(len(one.top) == 2 and one.logprob == one.top[0][1] for one in output.logprobs)
    assert len(output.prompt_logprobs) == output.prompt_tokens - 1
    streamed = [one for output in engine.stream("Once upon a time", GREEDY, logprobs=0) for one in output.logprobs]
    assert [one.token for one in streamed] == output.token_ids
    assert asyncio.run(engine.agenerate("Once upon a time", GREEDY, **wanted))[0].logprobs == output.logprobs
    assert engine.generate("Once upon a time", GREEDY)[0].logprobs is None


def test_streamed_deltas_are_the_text(engine):
    outputs = list(engine.stream("Once upon a time", GREEDY))
    assert "".join(output.delta for output in outputs) == outputs[-1].text
    assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].completion_tokens == 6


def test_n_completions_share_the_prompt(engine):
    outputs = engine.generate("A list of colours:", {"n": 3, "seed": 5, "max_new_tokens": 5})
    assert [output.choice for output in outputs] == [0, 1, 2]
    assert len({output.text for output in outputs}) > 1
    again = engine.generate("A list of colours:", {"n": 3, "seed": 5, "max_new_tokens": 5})
    assert [output.text for output in again] == [output.text for output in outputs]


def test_a_closed_stream_is_aborted(engine):
    stream = engine.stream("Tell me a long story", {"max_new_tokens": 2000, "temperature": 0})
    next(stream)
    stream.close()
    assert engine.state()["running"] == 0


def test_async(engine):
    async def work():
        first, second = await asyncio.gather(engine.agenerate("Once", GREEDY), engine.agenerate("Twice", GREEDY))
        deltas = [output.delta async for output in engine.astream("Once", GREEDY)]
        return first[0].text, second[0].text, "".join(deltas)

    once, twice, streamed = asyncio.run(work())
    assert once == streamed
    assert once != twice


@pytest.mark.parametrize(
    ("prompt", "sampling", "word"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ([1, 1 << 20], {}, "out of range"),
        ([-1], {}, "out of range"),
        ([5] * 5000, {}, "pool"),
        ([5] * 9000, {}, "context"),
        ("x", {"stop_token_ids": [60000]}, "out of range"),
    ],
)
def test_what_can_never_be_served_is_refused(engine, prompt, sampling, word):
    with pytest.raises(InvalidRequest, match=word):
        list(engine.stream_all([Submission(prompt, SamplingParams(**sampling))]))
    assert engine.generate("Still there?", GREEDY)[0].completion_tokens > 0


def test_as_many_tokens_as_fit(tiny_dir):
    with Engine(str(tiny_dir), dtype="float32", pool_tokens=64) as engine:
        (output,) = engine.generate([[1, 2, 3]], {"max_new_tokens": None, "ignore_eos": True})
        assert output.completion_tokens == 61
        assert output.finish.type == "length"


def test_behind_modules_the_context_is_counted_in_positions(tiny_dir):
    """A module that is not imported has no rows, but positions."""
    with Engine(str(tiny_dir), dtype="float32", pool_tokens=1024, max_output_tokens=500) as engine:
        modules = "".join(f"<module name='{name}'>{' word' * 100}</module>" for name in "ab")
        prompt = engine.schema(f"<schema name='s'>{modules}</schema>").compile("<prompt schema='s'><b/>Go on</prompt>")
        assert prompt.length + 100 <= prompt.stop
        (output,) = engine.generate(prompt, {"max_new_tokens": None, "ignore_eos": True})
        assert output.completion_tokens == 512 - prompt.stop
        (output,) = engine.generate(prompt, {"max_new_tokens": 512 - prompt.stop + 1, "ignore_eos": True})
        assert output.completion_tokens == 512 - prompt.stop


def test_a_closed_engine_says_so(tiny_dir):
    engine = Engine(str(tiny_dir), dtype="float32", pool_tokens=64)
    engine.close()
    with pytest.raises(EngineDead):
        engine.generate("x", {"max_new_tokens": 1})


def test_unknown_options_and_a_pool_that_holds_nothing(tiny_dir):
    with pytest.raises(ValueError, match="no such option"):
        Engine(str(tiny_dir), colour="green")
    with pytest.raises(ModelError, match="two pages"):
        Engine(str(tiny_dir), pool_tokens=8)
    with pytest.raises(ModelError, match="supports at most 512"):
        Engine(str(tiny_dir), context_length=4096)


LONG = {"max_new_tokens": 400, "ignore_eos": True}


def test_an_event_loop_that_is_left_ends_nothing(engine):
    """Cancelling `agenerate`, and leaving `asyncio.run`, which closes the loop to which outputs would go."""

    async def leave() -> None:
        task = asyncio.create_task(engine.agenerate("Tell me a long story", LONG))
        stream = engine.astream("And another one", LONG)
        await anext(stream)
        task.cancel()

    asyncio.run(leave())
    assert engine.generate("Still there?", GREEDY)[0].completion_tokens > 0


def test_a_cancelled_batch_leaves_no_request(engine):
    async def cancel(reached: Callable[[], bool]) -> None:
        task = asyncio.create_task(engine.agenerate([[i + 3] * 9 for i in range(16)], LONG))
        await asyncio.sleep(0)
        while not reached():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    core = engine.core
    generated = core.counters["generation_tokens"]
    for reached in (
        lambda: True,
        lambda: bool(core.requests),
        lambda: core.counters["generation_tokens"] > generated,
    ):
        asyncio.run(cancel(reached))
        assert engine.state()["running"] == engine.state()["waiting"] == 0
        assert not engine.core.requests
