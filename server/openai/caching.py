"""OpenAI's contract of prompt caches: breakpoints up to which a prompt is kept, for a time from its last use on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_PLACES, KeptText, Output, Prompt
from runtime.models.marks import find_places, new_place
from server.http.wire import Body

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


class Marker:
    """Writes marks behind texts that have a breakpoint.

    Attributes:
        marks: those written, with the seconds of each.
    """

    def __init__(self, default: str):
        self.default = default
        self.marks: list[tuple[str, float]] = []

    def __call__(self, point: Breakpoint | None) -> str:
        if point is None:
            return ""
        self.marks.append((new_place(), _SECONDS[point.ttl or self.default]))
        return self.marks[-1][0]


def keep_places(
    prompt: Prompt,
    options: CacheOptions | None,
    retention: Retention | None,
    marked: Callable[[Marker], Prompt],
) -> Prompt:
    """A prompt with the places up to which a request wants it to be kept.

    Args:
        prompt: as it is without marks.
        options, retention: of the request.
        marked: renders the prompt with marks.

    Raises:
        InvalidRequest: for a prompt with documents.
    """
    asked = options or CacheOptions()
    long = retention == "24h"
    marker = Marker("24h" if options is None and long else asked.ttl)
    other = marked(marker)
    if not isinstance(prompt, str) or not isinstance(other, str):
        raise InvalidRequest("a prompt with documents is not kept by breakpoints", param="prompt_cache_options")
    implicit = [(len(prompt), _SECONDS[marker.default])] if asked.mode == "implicit" else []
    places = find_places(prompt, other, [mark for mark, _ in marker.marks])
    explicit = [(place, seconds) for place, (_, seconds) in zip(places, marker.marks, strict=True)]
    return KeptText(prompt, [*explicit[-(MAX_PLACES - len(implicit)) :], *implicit])


def cache_usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Tokens that were read from the cache, and those that were computed and are kept."""
    read, written = 0, dict.fromkeys(("ttl_30m_tokens", "ttl_12h_tokens"), 0)
    for output in outputs:
        read += output.cached_tokens
        for seconds, tokens in (output.cache.created if output.cache else {}).items():
            written["ttl_30m_tokens" if seconds <= _SECONDS["30m"] else "ttl_12h_tokens"] += tokens
    total = {"cached_tokens": read, "cache_write_tokens": sum(written.values())}
    return total | {"cache_write_tokens_details": written}
