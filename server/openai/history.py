"""Puts a conversation into the form that a model's chat template takes."""

from collections import deque
from contextlib import suppress
from typing import Any, Literal

import xxhash

from runtime.models.tokenizer import Tokenizer
from server.openai.dialects.choosing import dialect_of

Turn = dict[str, Any]


def fitted(tokenizer: Tokenizer, turns: list[Turn]) -> list[Turn]:
    """The turns, with calls, ids and system messages as the template writes them."""
    template = tokenizer.chat_template or ""
    turns = place_systems(with_calls_as_text(tokenizer, turns), tokenizer.system_turns)
    if "[TOOL_CALLS]" in template:
        turns = [_with_short_ids(turn) for turn in _with_ids(turns)]
    if "<|channel|>" in template:
        turns = [_with_one_text(turn) for turn in turns]
    return turns


def with_calls_as_text(tokenizer: Tokenizer, turns: list[Turn]) -> list[Turn]:
    """The turns with calls as the model writes them, and results as users' turns, unless the template knows them."""
    template = tokenizer.chat_template or ""
    if "tool_calls" in template:
        return turns
    write, knows_results = dialect_of(tokenizer).write, '"tool"' in template

    def plain(turn: Turn) -> Turn:
        if turn["role"] == "tool" and not knows_results:
            return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        if calls := turn.get("tool_calls"):
            texts = [write(call["function"]) for call in calls]
            return {"role": turn["role"], "content": "\n".join([*filter(None, [turn["content"]]), *texts])}
        return turn

    return [plain(turn) for turn in turns]


def mended(turns: list[Turn]) -> list[Turn]:
    """The turns in a form that more templates take: roles alternate, arguments are objects, nothing is missing."""
    found: list[Turn] = []
    for turn in map(_whole, _with_ids(turns)):
        before = found[-1] if found else {"role": ""}
        if before["role"] == "tool" and turn["role"] == "user":
            found.append({"role": "assistant", "content": " "})
        # A text that precedes calls stays on its own, because some templates write the calls alone.
        if before["role"] == turn["role"] != "tool" and not (before.keys() | turn.keys()) & {"tool_calls"}:
            joined = {name: f"{before[name]}\n\n{turn[name]}" for name in before.keys() & turn.keys() - {"role"}}
            found[-1] = {**before, **turn, **joined}
        else:
            found.append(turn)
    return found


def _with_ids(turns: list[Turn]) -> list[Turn]:
    """The turns with ids of calls and results; where they are missing, the order tells which belong together."""
    found, waiting = [], deque[str]()
    for i, turn in enumerate(turns):
        if turn.get("tool_calls"):
            calls = [{**call, "id": call["id"] or f"call {i} {n}"} for n, call in enumerate(turn["tool_calls"])]
            turn, waiting = {**turn, "tool_calls": calls}, deque(call["id"] for call in calls)
        elif turn["role"] == "tool":
            id = turn.get("tool_call_id") or (waiting[0] if waiting else "")
            turn = {**turn, "tool_call_id": id}
            with suppress(ValueError):
                waiting.remove(id)
        found.append(turn)
    return found


def _whole(turn: Turn) -> Turn:
    """The turn with objects as arguments, and a content."""
    if "tool_calls" not in turn:
        return {**turn, "content": turn["content"] or " "}

    def call(given: dict[str, Any]) -> dict[str, Any]:
        name, arguments = given["function"]["name"], given["function"]["arguments"]
        arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        return {**given, "function": {"name": name, "arguments": arguments}}

    return {**turn, "tool_calls": [call(given) for given in turn["tool_calls"]]}


def place_systems(turns: list[Turn], taken: Literal["anywhere", "first", "nowhere"]) -> list[Turn]:
    """The turns, with each system message in a form that the template takes.

    A system message becomes a part of the user's turn beside it, marked as `<system>`, or a user's turn of its own. If
    it moved to the beginning instead, the prompt would change from there on, and nothing cached could be read.

    Args:
        turns: dicts for the chat template, whose contents are strings.
        taken: see `Tokenizer.system_turns`.
    """
    if taken == "anywhere":
        return turns
    others = (i for i, turn in enumerate(turns) if turn["role"] != "system")
    leading = next(others, len(turns)) if taken == "first" else 0
    placed = [{**turns[0], "content": "\n\n".join(turn["content"] for turn in turns[:leading])}] if leading else []
    after_mark = False
    for turn in turns[leading:]:
        is_marked = turn["role"] == "system"
        if is_marked:
            turn = {"role": "user", "content": f"<system>\n{turn['content']}\n</system>"}
        if placed and placed[-1]["role"] == turn["role"] == "user" and (is_marked or after_mark):
            placed[-1] = {**placed[-1], "content": f"{placed[-1]['content']}\n\n{turn['content']}"}
        else:
            placed.append(turn)
        after_mark = is_marked or (after_mark and turn["role"] == "user")
    return placed


def _with_short_ids(turn: Turn) -> Turn:
    """The turn with ids of nine characters, because Mistral's chat templates refuse others."""

    def short(id: str) -> str:
        return id if len(id) == 9 else xxhash.xxh64_hexdigest(id.encode())[:9]

    if turn["role"] == "tool":
        return {**turn, "tool_call_id": short(turn["tool_call_id"])}
    calls = [{**call, "id": short(call["id"])} for call in turn.get("tool_calls", ())]
    return turn | ({"tool_calls": calls} if calls else {})


def _with_one_text(turn: Turn) -> Turn:
    """The turn with its text in the reasoning, if it also has calls: gpt-oss's chat template refuses all three."""
    if not (turn.get("tool_calls") and turn.get("thinking") and turn["content"]):
        return turn
    return {**turn, "thinking": f"{turn['thinking']}\n{turn['content']}", "content": ""}
