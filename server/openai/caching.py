"""OpenAI's contract of prompt caches: breakpoints up to which a prompt is kept, for a time from its last use on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_BREAKPOINTS, MarkedText, Output, Prompt
from server.generation.bodies import AnswerId
from server.generation.breakpoints import find_breakpoints
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
    comparison_response_id: AnswerId | None = None


# Writes behind a text that may have a breakpoint.
Mark = Callable[[Breakpoint | None], str]


def keep_places(write: Callable[[Mark], Prompt], options: CacheOptions | None, retention: Retention | None) -> Prompt:
    """A prompt with the places up to which a request wants it to be kept.

    Args:
        write: renders the prompt.
        options, retention: of the request.

    Raises:
        InvalidRequest: for a prompt with documents.
    """
    default = "24h" if options is None and retention == "24h" else (options or CacheOptions()).ttl
    is_implicit = options is None or options.mode == "implicit"
    prompt, found = find_breakpoints(write, MAX_BREAKPOINTS - is_implicit)
    if not isinstance(prompt, str):
        raise InvalidRequest("a prompt with documents is not kept by breakpoints", param="prompt_cache_options")
    explicit = [(end, _SECONDS[point.ttl or default]) for end, point in found]
    return MarkedText(prompt, explicit + ([(len(prompt), _SECONDS[default])] if is_implicit else []))


def cache_usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Tokens that were read from the cache, and those that were computed and are kept."""
    read, written = 0, dict.fromkeys(("ttl_30m_tokens", "ttl_12h_tokens"), 0)
    for output in outputs:
        read += output.cached_tokens
        for seconds, tokens in (output.usage.created if output.usage else {}).items():
            written["ttl_30m_tokens" if seconds <= _SECONDS["30m"] else "ttl_12h_tokens"] += tokens
    total = {"cached_tokens": read, "cache_write_tokens": sum(written.values())}
    return total | {"cache_write_tokens_details": written}
