"""Long work of the server's process: a key that floods waits for itself, and whoever leaves stops."""

import asyncio
import threading

import pytest

from radix import Namespace
from runtime.config import make_config
from runtime.errors import InvalidRequest, RateLimited
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.output_processor import OutputProcessor
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import AddRequest
from tests.runtime.frontend.test_limits import FewTokens
from tests.runtime.frontend.test_request_ids import INFO


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
