"""The framing of streams and what ends them, without a server."""

import asyncio
import json

import pytest

from runtime.errors import EngineDead
from server.errors import ClientGone
from server.http import sse
from server.http.sse import EventStream, while_there

DONE = "data: [DONE]"


class Client:
    """The other end of an ASGI application; it leaves when told to."""

    def __init__(self):
        self.leaves = asyncio.Event()
        self.text = ""
        self.closed = 0

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.text += message.get("body", b"").decode()

    async def read(self, events, *idle):
        def on_close():
            self.closed += 1

        await EventStream(events, on_close, *idle)({"type": "http"}, self.receive, self.send)
        assert self.closed == 1
        return [block for block in self.text.split("\n\n") if block]


def run(make_events, client_type=Client):
    async def main():
        return await client_type().read(make_events())

    return asyncio.run(main())


def test_events_and_one_end():
    async def events():
        yield {"text": "é\n"}
        yield {"text": "b"}

    first, second, last = run(events)
    assert json.loads(first.removeprefix("data: ")) == {"text": "é\n"}
    assert (second, last) == ('data: {"text":"b"}', DONE)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (EngineDead("it died"), "engine_dead", "it died"),
        (ValueError("a secret of this machine"), "internal_error", "an internal error occurred"),
    ],
)
def test_a_failure_is_told_before_the_end(error, kind, message):
    async def events():
        yield {}
        raise error

    _, told, last = run(events)
    assert json.loads(told.removeprefix("data: "))["error"] == {
        "message": message,
        "type": kind,
        "param": None,
        "code": None,
    }
    assert last == DONE


def test_what_json_does_not_have_is_not_sent():
    async def events():
        yield {"logprob": float("nan")}

    assert run(events) == ['data: {"logprob":null}', DONE]


@pytest.mark.parametrize(
    ("sent", "pings"), [(": keep-alive", []), ('data: {"ping":1}', [lambda: [{"ping": 1}]])], ids=["comments", "events"]
)
def test_a_silent_stream_is_kept_alive(monkeypatch, sent, pings):
    """By events if its API has any for that."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)

    async def main():
        client = Client()

        async def events():
            while client.text.count(sent) < 2:
                await asyncio.sleep(0)
            yield {}

        return await client.read(events(), *pings)

    *kept, event, last = asyncio.run(main())
    assert set(kept) == {sent}
    assert (event, last) == ("data: {}", DONE)


def test_the_first_event_comes_soon(monkeypatch):
    monkeypatch.setattr(sse, "FIRST_S", 0.001)

    async def main():
        client = Client()

        async def events():
            while ": keep-alive" not in client.text:
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            yield {}

        return await client.read(events())

    assert asyncio.run(main()) == [": keep-alive", "data: {}", DONE]


def test_a_client_that_leaves_closes_the_events():
    closed = []

    async def main():
        client = Client()

        async def events():
            try:
                yield {}
                client.leaves.set()
                await asyncio.sleep(3600)
            finally:
                closed.append(True)

        return await client.read(events())

    assert asyncio.run(main()) == ["data: {}"]
    assert closed == [True]


def test_work_ends_with_its_client():
    ended = []

    async def work(client):
        try:
            if client is not None:
                client.leaves.set()
                await asyncio.sleep(3600)
        finally:
            ended.append(client)
        return "done"

    async def main():
        client = Client()
        assert await while_there(client, work(None)) == "done"
        with pytest.raises(ClientGone):
            await while_there(client, work(client))

    asyncio.run(main())
    assert len(ended) == 2


def test_a_connection_that_breaks_closes_the_events(monkeypatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    closed = []

    class Broken(Client):
        async def send(self, message):
            if message.get("body"):
                raise OSError("broken pipe")

    async def events():
        try:
            await asyncio.sleep(3600)
            yield {}
        finally:
            closed.append(True)

    assert run(events, Broken) == []
    assert closed == [True]
