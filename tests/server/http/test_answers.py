"""Long answers are encoded in slices; they are what they would be in one piece."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.output import Encoded, Output
from runtime.frontend.stream import OutputStream
from runtime.params import SamplingParams
from runtime.protocol import Finish, TokenLogprob
from server.generation.service import Generation
from server.http.answers import JsonAnswer, JsonList, encode, write_logprobs
from server.sglang.generate import GenerateRequest, GenerateWriter
from server.telemetry.journal import Journal
from server.telemetry.metrics import Metrics

VALUES = st.recursive(st.none() | st.booleans() | st.integers(0, 9) | st.text(), st.lists, max_leaves=5)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), VALUES | st.lists(VALUES).map(tuple)))
def test_lists_in_slices(answer):
    """Tuples stand for the lists that are encoded before the rest."""

    def sliced(value):
        if not isinstance(value, tuple):
            return value
        made = JsonList()
        for element in value:
            made.append(element)
        assert len(made) == len(value)
        return made

    assert json.loads(encode({name: sliced(value) for name, value in answer.items()})) == json.loads(json.dumps(answer))


def output(index: int, top: int, logprob: float = -1.0) -> Output:
    items = [TokenLogprob(i, logprob, [(i + j, -0.1 * j) for j in range(top)]) for i in range(3)]
    return Output(index, 0, "r", "x", "x", [5], [5], items, items, 3, 0, 1, Finish("length"), 0, 0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_answer_has_numbers_that_json_lacks(value):
    with pytest.raises(ValueError, match="log-probability"):
        asyncio.run(write_logprobs(OutputStream(None), print, output(0, 2, value)))


def test_a_long_answer_is_sent_in_pieces():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(JsonAnswer(["x" * (1 << 20)])({"type": "http"}, None, send))
    assert json.loads(b"".join(message.get("body", b"") for message in sent)) == ["x" * (1 << 20)]
    assert int(dict(sent[0]["headers"])[b"content-length"]) == (1 << 20) + 4
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert len(sent) > 4


class Outputs:
    """A stream of Outputs that have all arrived."""

    def __init__(self, outputs):
        self.prompts = {}
        self._left = list(outputs)
        self.submissions = [Encoded([0] * 3, SamplingParams(), logprobs=128, prompt_logprobs_from=0)] * len(self._left)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


def test_a_large_answer_leaves_the_event_loop_to_others(tokenizer):
    """256 prompts with 128 alternatives for each of their tokens took 1 s at a stretch: others run between any two."""
    body = GenerateRequest(
        input_ids=[[0] * 3] * 256,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=128,
        return_text_in_logprobs=True,
    )
    context = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer))
    generation = Generation(Outputs(output(i, 128) for i in range(256)), Metrics("x"), Journal())
    writer = GenerateWriter(body, True, generation, context)
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        answer = encode(await writer.answer(generation))
        ticker.cancel()
        return json.loads(answer)

    entries = asyncio.run(main())
    assert len(entries) == 256
    first = [-1.0, 0, tokenizer.decode([0], False)]
    assert entries[7]["meta_info"]["input_token_logprobs"][0] == first
    assert len(entries[7]["meta_info"]["output_top_logprobs"][2]) == 128
    assert turns >= 256
