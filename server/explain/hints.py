"""Usual causes of a difference, recognised."""

from __future__ import annotations

import json
import re
from typing import Any

from server.explain.compare import Parting

_DIGITS = re.compile(r"\d+")
# Of months and days, cut or whole.
_NAMES = re.compile(r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b")


def hint(first: list[Any], second: list[Any], parting: Parting) -> str | None:
    """A usual cause for which a prompt with tools `second` parts from one with tools `first`; None: none is known."""
    if json.dumps(first) != json.dumps(second) and parting.part.kind in ("tools", "system"):
        return _of_tools(first, second)
    here, there = parting.here, parting.there or ""
    plain = [_DIGITS.sub("0", _NAMES.sub("0", _widened(parting.before, text))) for text in (here, there)]
    if here and there and _alike(*plain):
        return "Only a date, a time or a number differs there: behind the rest of the prompt it would cost nothing."
    return None


def _of_tools(first: list[Any], second: list[Any]) -> str:
    written = [[json.dumps(tool) for tool in tools] for tools in (first, second)]
    canonical = [[json.dumps(tool, sort_keys=True) for tool in tools] for tools in (first, second)]
    if sorted(written[0]) == sorted(written[1]):
        return "The tools are the same in another order."
    if canonical[0] == canonical[1]:
        return "The tools are the same with their keys in another order."
    names = [[tool["function"]["name"] for tool in tools] for tools in (first, second)]
    more, fewer = [sorted(set(names[a]) - set(names[b])) for a, b in ((1, 0), (0, 1))]
    if more or fewer:
        said = [f"{verb}: {', '.join(some)}" for verb, some in (("new", more), ("missing", fewer)) if some]
        return f"Other tools are offered; {'; '.join(said)}."
    before = dict(zip(names[0], canonical[0], strict=True))
    changed = [name for name, tool in zip(names[1], canonical[1], strict=True) if before[name] != tool]
    return f"Tools were changed: {', '.join(changed)}."


def _widened(before: str, text: str) -> str:
    """A text with the word that it goes on with."""
    word = re.search(r"\w*$", before)
    return (word[0] if word else "") + text


def _alike(one: str, other: str) -> bool:
    """Whether the shorter of two texts, but for its cut end, begins the other one."""
    shorter, longer = sorted((one, other), key=len)
    return longer.startswith(shorter[: max(len(shorter) - 8, 8)])
