"""OpenAI's contract of prompt caches: breakpoints up to which a prompt is kept, for a time from its last use on."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_BREAKPOINTS, MarkedText, Output, Prompt
from runtime.models.marks import find_place, new_place
from server.generation.bodies import AnswerId
from server.http.wire import Body

# The first two are Anthropic's.
_SECONDS = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}

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


# Writes behind what may have a breakpoint.
Mark = Callable[[Breakpoint | None], str]


def unmarked(point: Breakpoint | None) -> str:
    """The `Mark` that writes nothing."""
    return ""


def keep_places(write: Callable[[Mark], Prompt], options: CacheOptions | None, retention: Retention | None) -> Prompt:
    """A prompt with the places up to which a request wants it to be kept.

    Breakpoints never change a prompt: each is found in another rendering, which has a mark there.

    Args:
        write: renders the prompt.
        options, retention: of the request.

    Raises:
        InvalidRequest: for a prompt with documents that is to be kept.
    """
    points: list[Breakpoint] = []

    def collect(point: Breakpoint | None) -> str:
        points.extend([] if point is None else [point])
        return ""

    def mark(wanted: int, place: str) -> Mark:
        left = count(-wanted)
        return lambda point: "" if point is None or next(left) else place

    prompt = write(collect)
    given = set() if options is None else options.model_fields_set - {"comparison_response_id"}
    if not (points or given or retention == "24h"):
        return prompt
    if not isinstance(prompt, str):
        raise InvalidRequest("a prompt with documents is not kept by breakpoints", param="prompt_cache_options")
    default = "24h" if options is None and retention == "24h" else (options or CacheOptions()).ttl
    is_implicit = options is None or options.mode == "implicit"
    kept = []
    for i in range(len(points))[is_implicit - MAX_BREAKPOINTS :]:
        place = new_place()
        kept.append((find_place(prompt, str(write(mark(i, place))), place), _SECONDS[points[i].ttl or default]))
    if is_implicit:
        kept.append((len(prompt), _SECONDS[default]))
    return MarkedText(prompt, kept) if kept else prompt


def cache_usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Tokens that were read from the cache, and those that were computed and are kept."""
    read, written = 0, dict.fromkeys(("ttl_30m_tokens", "ttl_12h_tokens"), 0)
    for output in outputs:
        read += output.cached_tokens
        for seconds, tokens in (output.usage.created if output.usage else {}).items():
            written["ttl_30m_tokens" if seconds <= _SECONDS["30m"] else "ttl_12h_tokens"] += tokens
    total = {"cached_tokens": read, "cache_write_tokens": sum(written.values())}
    return total | {"cache_write_tokens_details": written}
