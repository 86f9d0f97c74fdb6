"""Operators' calls to pin KV by its tokens: what is missing is computed by a request of its own first."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from radix.node import TOKEN_BYTES
from runtime.errors import InvalidRequest
from runtime.kv.cache import PagedCache
from runtime.params import SamplingParams
from runtime.protocol import AddPin, AddRequest, Finish, Reply, StepEvents
from runtime.reuse.strategy import Strategy


class Pinning:
    """Pins that wait for their KV, and answers to the calls that waited.

    Args:
        cache: of the engine.
        strategy_of, add: see `EngineCore`.
    """

    def __init__(
        self,
        cache: PagedCache,
        strategy_of: Callable[[dict[str, Any]], Strategy],
        add: Callable[[AddRequest], StepEvents | None],
    ):
        self._cache, self._strategy_of, self._add = cache, strategy_of, add
        self._computing: dict[str, AddPin] = {}
        self._replies: list[Reply] = []

    def take_replies(self) -> list[Reply]:
        """Answers to calls that took some steps, since the last call."""
        taken, self._replies = self._replies, []
        return taken

    def pin(self, message: AddPin) -> Reply | None:
        """Keep the whole pages of a prefix, or entries; what is missing is computed first, and answered for then."""
        if message.reuse is None:
            page_bytes = self._cache.page_size * TOKEN_BYTES
            whole = len(message.tokens) // page_bytes * page_bytes
            message = msgspec.structs.replace(message, tokens=message.tokens[:whole])
        answer = self._pin(message)
        if "missing_tokens" in answer and not self._cache.enabled:
            answer = {"refused": "the prefix cache is off"}
        if "missing_tokens" not in answer:
            return Reply(message.call, answer)
        sampling = SamplingParams(max_new_tokens=0, temperature=0).model_dump(exclude={"stop"})
        self._computing[message.rid] = message
        space, account = message.namespace, message.account
        asked = AddRequest(message.rid, message.tokens, sampling, space, account, diffusion={}, reuse=message.reuse)
        refused = self._add(asked)
        if refused is None:
            return None
        del self._computing[message.rid]
        finish = refused.events[0].finish
        return Reply(message.call, {"refused": None if finish is None else finish.message})

    def ended(self, rid: str, finish: Finish) -> bool:
        """Answer the call for which a request computed; False if it was another's."""
        message = self._computing.pop(rid, None)
        if message is None:
            return False
        answer: dict[str, Any] = {"refused": finish.message or "the prefix could not be computed"}
        if finish.type not in ("error", "abort"):
            answer = self._pin(message)
        if "missing_tokens" in answer:
            reason = "too much is running, or the tenant's quota is smaller than the prefix"
            answer = {"refused": f"the prefix was evicted as soon as it was computed: {reason}"}
        self._replies.append(Reply(message.call, answer))
        return True

    def _pin(self, message: AddPin) -> dict[str, Any]:
        """See `PinBoard.pin`; all entries of a message are pinned, or none."""
        asked, board = message.reuse or {}, self._cache.pins
        try:
            runs = self._strategy_of(asked).runs(array("i", message.tokens), message.namespace, asked)
        except InvalidRequest as error:
            return {"refused": error.message}
        pins: list[dict[str, Any]] = []
        for run in runs:
            answer = board.pin(run.tokens, run.namespace, message.name or run.name, message.ttl_s)
            if "pin" not in answer:
                for pin in pins:
                    board.unpin(pin["id"])
                return answer
            pins.append(answer["pin"])
        return {"pin": pins[0]} if message.reuse is None else {"pins": pins}
