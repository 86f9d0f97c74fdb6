"""OpenAI's contract of prompt caches: breakpoints up to which a prompt is kept, for a time from its last use on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_PLACES, KeptText, Output, Prompt
from runtime.models.marks import find_place, new_place
from server.http.wire import AnswerId, Body

_SECONDS = {"30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}

Ttl = Literal["30m", "12h"]
Retention = Literal["in_memory", "24h"]


class Breakpoint(Body):
    """The end of a text up to which the prompt is kept."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CacheOptions(Body):
    """Implicit: the whole prompt is kept, too. `prewarm`: the prompt is computed and kept, and nothing generated."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl = "30m"
    prewarm: bool = False
    comparison_response_id: AnswerId | None = None


# Writes behind a text that may have a breakpoint.
Mark = Callable[[Breakpoint | None], str]


def keep_places(write: Callable[[Mark], Prompt], options: CacheOptions | None, retention: Retention | None) -> Prompt:
    """A prompt with the places up to which a request wants it to be kept.

    Breakpoints never change it: each one's place is found in another rendering, which has a mark there.

    Args:
        write: renders the prompt.
        options, retention: of the request.

    Raises:
        InvalidRequest: for a prompt with documents.
    """
    points: list[Breakpoint] = []

    def collect(point: Breakpoint | None) -> str:
        points.extend([point] if point else [])
        return ""

    prompt = write(collect)
    if not isinstance(prompt, str):
        raise InvalidRequest("a prompt with documents is not kept by breakpoints", param="prompt_cache_options")
    default = "24h" if options is None and retention == "24h" else (options or CacheOptions()).ttl
    implicit = [(len(prompt), _SECONDS[default])] if options is None or options.mode == "implicit" else []
    explicit = []
    for i in range(len(points))[-(MAX_PLACES - len(implicit)) :]:
        place = new_place()
        explicit.append((find_place(prompt, str(write(_at(i, place))), place), _SECONDS[points[i].ttl or default]))
    return KeptText(prompt, explicit + implicit)


def _at(wanted: int, place: str) -> Mark:
    """Writes a mark at one of the breakpoints alone."""
    left = count(-wanted)
    return lambda point: "" if point is None or next(left) else place


def cache_usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Tokens that were read from the cache, and those that were computed and are kept."""
    read, written = 0, dict.fromkeys(("ttl_30m_tokens", "ttl_12h_tokens"), 0)
    for output in outputs:
        read += output.cached_tokens
        for seconds, tokens in (output.cache.created if output.cache else {}).items():
            written["ttl_30m_tokens" if seconds <= _SECONDS["30m"] else "ttl_12h_tokens"] += tokens
    total = {"cached_tokens": read, "cache_write_tokens": sum(written.values())}
    return total | {"cache_write_tokens_details": written}
