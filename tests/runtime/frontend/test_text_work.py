"""Long work of the server's process: a key that floods waits for itself, and whoever leaves stops."""

import asyncio
import json
import threading

import pytest

from radix import Namespace
from runtime.config import make_config
from runtime.errors import InvalidRequest, RateLimited
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.text_work import TextWork
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from tests.runtime.frontend.listening import ids_of
from tests.runtime.frontend.test_limits import FewTokens
from tests.runtime.frontend.test_request_ids import INFO

# Each pattern more doubles the time that llguidance takes to find out whether a text fits them all.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*"} for i in range(40)]})


class Slow(Tokenizer):
    """A tokenizer that takes as long as it is told to for texts that begin with `slow`."""

    def __init__(self, path):
        real = Tokenizer.load(path)
        super().__init__(real._fast, real._config, real.chat_template)
        self.go_on = threading.Event()
        self.begun = []

    def encode(self, text, add_special_tokens=True):
        self.begun.append(text)
        if text.startswith("slow"):
            assert self.go_on.wait(60)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def slow(tiny_dir):
    slow = Slow(tiny_dir)
    yield slow
    slow.go_on.set()


@pytest.fixture
def engine(slow):
    """An engine without a process; `sent`: what would be sent to it."""
    engine = AsyncEngine(make_config())
    engine.sent = []
    limits = FewTokens(max_running=4, max_waiting=12, tokens=2000)
    engine.tokenizer = slow
    engine._frontend = OutputProcessor(InputProcessor(INFO, slow, limits), engine.sent.append)
    yield engine
    engine._work.close()


def texts_of(tokenizer: Tokenizer) -> set[str]:
    return {text for text in tokenizer.begun if text.startswith("slow")}


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_flood_of_texts_is_its_keys_alone(engine, slow):
    async def main() -> None:
        frontend = engine._frontend
        asks = [engine.tokenize("flood", [f"slow {i}"] * 3) for i in range(4)]
        asks += [engine.open([Submission(f"slow {i}", account="flood")]) for i in range(4, 8)]
        flood = [asyncio.create_task(ask) for ask in asks]
        await until(lambda: slow.begun)
        for ask in (engine.tokenize("flood", ["x"]), engine.detokenize("flood", [[1]])):
            with pytest.raises(RateLimited):
                await ask
        assert await engine.tokenize("other", ["quick", "x"]) == [slow.encode("quick"), slow.encode("x")]
        assert await engine.detokenize("other", [[33, 34], []]) == ["12", ""]
        (await engine.open([Submission("quick", account="other")])).close()
        assert not any(task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert frontend.num_open == frontend._admission.open.total() == frontend._admission.waiting_tokens.total() == 0
        begun = texts_of(slow)
        slow.go_on.set()
        await engine.tokenize("flood", ["last"])
        assert texts_of(slow) == begun, "whoever has left stops"
        assert [message.namespace for message in engine.sent if isinstance(message, AddRequest)] == [Namespace()]

    asyncio.run(main())


def test_texts_that_wait_count_as_tokens_that_wait(engine, slow):
    async def main() -> None:
        long = asyncio.create_task(engine.tokenize("a", ["slow" + "x" * 3900]))
        await until(lambda: slow.begun)
        for ask in (engine.tokenize("a", ["x" * 500]), engine.open([Submission([1] * 50, account="a")])):
            with pytest.raises(RateLimited, match="wait"):
                await ask
        with pytest.raises(InvalidRequest, match="characters"):
            await engine.tokenize("a", ["x" * 2000] * 1000)
        assert await engine.tokenize("a", ["x"])
        slow.go_on.set()
        await long

    asyncio.run(main())


def test_a_prompt_is_rendered_in_its_turn_and_so_is_an_answer(engine, slow):
    names = []

    def render() -> str:
        names.append(threading.current_thread().name)
        return "rendered"

    async def main() -> None:
        stream = await engine.open([Submission(render, account="a", num_characters=8)])
        _, sent = engine.sent
        assert sent.tokens == b"".join(token.to_bytes(4, "little") for token in slow.encode("rendered"))
        await stream.in_turn(render)
        stream.close()
        assert all(name.startswith("ramet-text") for name in names)
        assert len(names) == 2

    asyncio.run(main())


def test_where_a_grammar_cannot_be_followed_another_one_may_do(engine, monkeypatch):
    good, bad = SamplingParams(regex="a+"), SamplingParams(regex="(unclosed")
    checked, check = [], engine._work._processes.check
    monkeypatch.setattr(engine._work._processes, "check", lambda params: (checked.append(params.regex), check(params)))

    async def ask(sampling, otherwise):
        submission = Submission("x", sampling, otherwise=otherwise)
        return (await engine._work.encode(engine._frontend.inputs, submission)).sampling

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


def test_a_grammar_without_end_is_its_keys_alone(engine):
    """Neither the wait for a turn nor the start of a process counts as compiling."""

    async def main() -> None:
        work = TextWork(1.5)
        ask = [Submission("x", SamplingParams(json_schema=ENDLESS), account="flood") for _ in range(2)]
        flood = [asyncio.create_task(work.encode(engine._frontend.inputs, submission)) for submission in ask]
        good = Submission("x", SamplingParams(regex="[a-z]+"), account="flood")
        last = asyncio.create_task(work.encode(engine._frontend.inputs, good))
        other = [Submission("x", SamplingParams(regex=regex), account="other") for regex in ("[a-z]+", "(")]
        assert ids_of(await work.encode(engine._frontend.inputs, other[0])) == engine.tokenizer.encode("x")
        with pytest.raises(InvalidRequest, match="regex cannot be followed"):
            await work.encode(engine._frontend.inputs, other[1])
        assert not last.done()
        for task in flood:
            with pytest.raises(InvalidRequest, match=r"json_schema takes longer than 1\.5 s"):
                await task
        assert await last, "it waited for seconds"
        processes = list(work._processes._all)
        work.close()
        assert all(process.poll() is not None for process in processes)

    asyncio.run(main())
