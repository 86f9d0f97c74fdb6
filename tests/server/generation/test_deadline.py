"""Work on a request before its prompt is submitted: it counts as the request's time, and waits for a turn."""

import asyncio
from types import SimpleNamespace

import pytest

from runtime.errors import DeadlineExceeded
from runtime.frontend.output import Submission
from server.anthropic.content import ContentPiece
from server.anthropic.threads import continued, keep
from server.anthropic.types import MessagesRequest
from server.auth.keys import Tenant
from server.features.parts import Stores
from server.generation.store import ResponseStore
from server.http.context import Context
from server.http.shutdown import ShutdownFlag
from server.openai.prompt import ChatPrompts
from server.openai.types import ChatRequest
from tests.runtime.frontend.test_text_work import engine, slow, until  # noqa: F401 (two are fixtures)


def test_a_deadline_counts_from_the_arrival_of_the_request(engine, slow):  # noqa: F811
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], timeout_s=0.01, tools=tools)
    context = Context(engine, engine.config, [], ShutdownFlag())
    chats, request = ChatPrompts(context, Stores(())), SimpleNamespace(receive=asyncio.Event().wait)

    async def main() -> None:
        flood = [asyncio.create_task(engine.tokenize("", [f"slow {i}"])) for i in range(2)]  # all that a key may occupy
        await until(lambda: len(slow.begun) == 2)
        with pytest.raises(DeadlineExceeded, match=r"its 0\.01 seconds"):
            await chats.make_submission(request, body, Tenant("", b""), body.deadline(context))
        slow.go_on.set()
        await asyncio.gather(*flood)
        with pytest.raises(DeadlineExceeded):  # nothing is left of it
            await engine.open([Submission("quick")], body.deadline(context))

    asyncio.run(main())


def test_threads_are_read_and_written_in_turn(engine, slow):  # noqa: F811
    """The event loop serves others meanwhile."""
    said, threads = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, ResponseStore()
    start = MessagesRequest(**said, thread={"type": "create"})
    more = MessagesRequest(**said, thread={"type": "continue", "previous_message_id": "msg_1"})
    to_keep = start, [ContentPiece("text", "y")], "msg_1", threads, "a"

    async def main() -> None:
        await keep(*to_keep, lambda work: engine.in_turn("a", 0, work))
        flood = [asyncio.create_task(engine.tokenize("a", [f"slow {i}"])) for i in range(2)]
        await until(lambda: len(slow.begun) == 2)
        waiting = [continued(more, threads, "a", engine), keep(*to_keep, lambda work: engine.in_turn("a", 0, work))]
        tasks = [asyncio.create_task(work) for work in waiting]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        slow.go_on.set()
        whole, _ = await asyncio.gather(*tasks)
        await asyncio.gather(*flood)
        assert [message.role for message in whole.messages] == ["user", "assistant", "user"]

    asyncio.run(main())
