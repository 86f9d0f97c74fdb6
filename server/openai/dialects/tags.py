"""Finds the tags around calls and parameters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OBJECT = re.compile(r"\s{0,8}(\{|\[\s{0,8}\{)")


@dataclass(slots=True)
class Closing:
    """Where the search for a call's closing tag stands, behind the opening tag; `in_string`: of JSON."""

    at: int = 0
    in_string: bool = False


def end_of_call(text: str, start: int, closing: str, inner: str = ">", search: Closing | None = None) -> int:
    """Where the tag that closes a call begins, at or behind `start`; -1 if it is missing.

    Strings of JSON may have the tag, and so may values between other tags, unless `inner` stands before it.
    """
    search = search or Closing()
    is_json, at = _OBJECT.match(text, start) is not None, start + search.at
    end = text.find(closing, at + bool(search.at))
    while end >= 0:
        if is_json:
            search.in_string ^= bool(text[at:end].replace("\\\\", "").replace('\\"', "").count('"') % 2)
            if not search.in_string:
                return end
        elif text.find("<", start, end) < 0 or text[max(start, end - 40) : end].rstrip().endswith(inner):
            return end
        search.at, at, end = end - start, end, text.find(closing, end + 1)
    return -1


def blocks(opening: re.Pattern[str], closing: str, text: str, is_wrapped: bool = False) -> Iterator[tuple[str, str]]:
    """The name in each match of `opening`, and the text up to its `closing`, which no text but the next match follows.

    `is_wrapped`: line breaks at the text's ends do not belong to it. An unclosed text ends them.
    """
    found = opening.search(text)
    while found is not None:
        following = opening.search(text, found.end())
        limit = following.start() if following else len(text)
        end = text.rfind(closing, found.end(), limit)
        if end < 0 or text[end + len(closing) : limit].strip():
            end = text.find(closing, found.end())
            following = opening.search(text, end)
        if end < 0:
            return
        inner = text[found.end() : end]
        yield found[1], inner.removeprefix("\n").removesuffix("\n") if is_wrapped else inner
        found = following
