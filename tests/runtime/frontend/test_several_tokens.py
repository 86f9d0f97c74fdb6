"""Events of several tokens: the output is that of one token at a time."""

import asyncio

import pytest

from runtime.config import SchedulerConfig
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Output, Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.stream import OutputStream
from runtime.params import SamplingParams
from runtime.protocol import Abort, AddRequest, Finish, TokenEvent, TokenLogprob
from tests.runtime.frontend.listening import Listener
from tests.runtime.frontend.test_request_ids import INFO

TEXT = "One, two, three END four, five END six."


def test_a_stop_string_counts_from_the_least_number_of_tokens_on(tokenizer):
    tokens = tokenizer.encode(TEXT)
    at = next(i for i in range(len(tokens)) if "END" in tokenizer.decode(tokens[:i]))
    for least, text in ((at, "One, two, three "), (at + 1, "One, two, three END four, five ")):
        found, _ = outputs_of(tokenizer, [[token] for token in tokens], stop=["END"], min_new_tokens=least)
        assert found[-1].text == text


def outputs_of(tokenizer, pieces, **params):
    """The Outputs of tokens that come in pieces, and whether the engine was told to stop."""
    found, sent = [], []
    frontend = OutputProcessor(InputProcessor(INFO, tokenizer, SchedulerConfig()), sent.append)
    frontend.submit(frontend.inputs.encode(Submission([1], SamplingParams(**params))), Listener(found.append))
    rid = next(message.rid for message in sent if isinstance(message, AddRequest))
    for i, piece in enumerate(pieces):
        last = Finish("length") if i == len(pieces) - 1 else None
        logprobs = [TokenLogprob(token, -1.0, []) for token in piece]
        frontend.take([TokenEvent(rid, piece, last, logprobs=logprobs)])
    return found, any(isinstance(message, Abort) for message in sent)


@pytest.mark.parametrize("size", [2, 3, 7, 100])
@pytest.mark.parametrize(
    "params",
    [{}, {"stop": ["END"]}, {"stop": ["END"], "min_new_tokens": 10}, {"stop": ["three E"], "no_stop_trim": True}],
)
def test_a_stop_string_ends_the_output_at_its_last_token(tokenizer, params, size):
    tokens = tokenizer.encode(TEXT)
    single, _ = outputs_of(tokenizer, [[token] for token in tokens], **params)
    several, told = outputs_of(tokenizer, [tokens[i : i + size] for i in range(0, len(tokens), size)], **params)
    assert several[-1].text == single[-1].text == "".join(output.delta for output in several)
    assert several[-1].token_ids == single[-1].token_ids
    assert several[-1].completion_tokens == single[-1].completion_tokens == len(several[-1].token_ids)
    assert several[-1].finish == single[-1].finish
    assert [one.token for output in several for one in output.logprobs] == several[-1].token_ids
    assert told == ("stop" in params and several[-1].completion_tokens <= len(tokens) - (len(tokens) % size or size))


def test_a_slow_reader_gets_what_has_arrived_of_a_completion_as_one(tokenizer):
    sent = []
    tokens = tokenizer.encode(TEXT)
    frontend = OutputProcessor(InputProcessor(INFO, tokenizer, SchedulerConfig()), sent.append)
    stream = OutputStream(frontend)
    frontend.submit(frontend.inputs.encode(Submission([1], SamplingParams(n=2))), stream)
    first, second = (message.rid for message in sent[1:])

    async def read() -> list[Output]:
        for token in tokens[:3]:
            frontend.take([TokenEvent(first, [token])])
        frontend.take([TokenEvent(second, tokens[:1], Finish("length"))])
        found = [await anext(stream)]
        for i, token in enumerate(tokens[3:], start=4):
            frontend.take([TokenEvent(first, [token], Finish("length") if i == len(tokens) else None)])
        return found + [output async for output in stream]

    outputs = asyncio.run(read())
    assert [output.choice for output in outputs] == [0, 1, 0]
    assert [output.new_token_ids for output in outputs] == [tokens[:3], tokens[:1], tokens[3:]]
    assert outputs[0].delta + outputs[2].delta == outputs[2].text == tokenizer.decode(tokens)
