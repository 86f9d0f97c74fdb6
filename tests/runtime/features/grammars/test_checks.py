"""Grammars are checked in processes: one that never ends is its key's alone."""

import asyncio
import json

import pytest

from runtime.errors import InvalidRequest
from runtime.features.grammars.checks import GrammarChecks
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.text_work import TextWork
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from tests.runtime.frontend.listening import ids_of
from tests.runtime.frontend.test_limits import FewTokens
from tests.runtime.frontend.test_request_ids import INFO

# Each pattern more doubles the time that llguidance takes to find out whether a text fits them all.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*"} for i in range(40)]})


@pytest.fixture
def work():
    work = TextWork()
    yield work
    work.close()


@pytest.fixture
def make_inputs(tiny_dir):
    """Makes input processors that check grammars, with a time limit in seconds."""
    opened = []

    def make(timeout_s: float = 30.0) -> InputProcessor:
        opened.append(GrammarChecks(timeout_s))
        return InputProcessor(INFO, Tokenizer.load(tiny_dir), FewTokens(tokens=2000), opened[-1:])

    yield make
    for checks in opened:
        checks.close()


def test_where_a_grammar_cannot_be_followed_another_one_may_do(work, make_inputs, monkeypatch):
    inputs = make_inputs()
    processes = inputs.preparers[0]._processes
    good, bad = SamplingParams(regex="a+"), SamplingParams(regex="(unclosed")
    checked, check = [], processes.check
    monkeypatch.setattr(processes, "check", lambda params: (checked.append(params.regex), check(params)))

    async def ask(sampling, otherwise):
        submission = Submission("x", sampling, otherwise=otherwise)
        return (await work.encode(inputs, submission)).sampling

    async def run():
        assert await ask(bad, good) is good
        assert await ask(bad, good) is good
        assert checked == ["(unclosed"], "what is known is not checked again"
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await ask(bad, None)
        assert await ask(good, None) is good
        assert await ask(good, bad) is good
        assert checked == ["(unclosed"] * 3 + ["a+"]

    asyncio.run(run())


def test_a_grammar_without_end_is_its_keys_alone(work, make_inputs):
    """Neither the wait for a turn nor the start of a process counts as compiling."""

    async def main() -> None:
        inputs = make_inputs(1.5)
        ask = [Submission("x", SamplingParams(json_schema=ENDLESS), account="flood") for _ in range(2)]
        flood = [asyncio.create_task(work.encode(inputs, submission)) for submission in ask]
        good = Submission("x", SamplingParams(regex="[a-z]+"), account="flood")
        last = asyncio.create_task(work.encode(inputs, good))
        other = [Submission("x", SamplingParams(regex=regex), account="other") for regex in ("[a-z]+", "(")]
        assert ids_of(await work.encode(inputs, other[0])) == inputs.tokenizer.encode("x")
        with pytest.raises(InvalidRequest, match="regex cannot be followed"):
            await work.encode(inputs, other[1])
        assert not last.done()
        for task in flood:
            with pytest.raises(InvalidRequest, match=r"json_schema takes longer than 1\.5 s"):
                await task
        assert await last, "it waited for seconds"
        processes = list(inputs.preparers[0]._processes._all)
        inputs.preparers[0].close()
        assert all(process.poll() is not None for process in processes)

    asyncio.run(main())
