"""System messages that a chat template does not take where they stand."""

from typing import Any, Literal

Turn = dict[str, Any]


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
