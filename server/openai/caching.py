"""OpenAI's prompt caching: prompts are kept up to breakpoints, for a time after each use."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Literal

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_BREAKPOINTS, MarkedText, Output, Prompt, UnplacedPrompt
from runtime.models.marks import find_place, new_place
from server.generation.bodies import AnswerId
from server.http.body import Body

# `5m` and `1h` are Anthropic's.
_SECONDS = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}

Ttl = Literal["30m", "12h"]
Retention = Literal["in_memory", "24h"]


class ExplicitBreakpoint(Body):
    """A breakpoint: the prompt up to the end of this text, tool or call is kept."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CacheOptions(Body):
    """Mode `implicit` also keeps the whole prompt. `prewarm` computes and keeps the prompt and generates nothing."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl = "30m"
    prewarm: bool = False
    comparison_response_id: AnswerId | None = None


# Returns the text to write behind something that may have a breakpoint: usually none, or a mark.
Mark = Callable[[ExplicitBreakpoint | None], str]


def unmarked(point: ExplicitBreakpoint | None) -> str:
    """The `Mark` that never writes anything."""
    return ""


def keep_places(
    write: Callable[[Mark], str | UnplacedPrompt], options: CacheOptions | None, retention: Retention | None
) -> Prompt:
    """A prompt with the places up to which it is to be kept.

    Breakpoints never change the prompt. Each is found by rendering the prompt again, with a mark at the breakpoint.

    Args:
        write: renders the prompt.
        options, retention: the request's fields.

    Raises:
        InvalidRequest: if the prompt has parts and is to be kept.
    """
    points: list[ExplicitBreakpoint] = []

    def collect(point: ExplicitBreakpoint | None) -> str:
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
        raise InvalidRequest(f"a prompt with {prompt.noun} cannot be kept", param="prompt_cache_options")
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
    """The number of tokens read from the cache, and of tokens computed and kept, by hold time."""
    read, replayed, written = 0, 0, dict.fromkeys(("ttl_30m_tokens", "ttl_12h_tokens"), 0)
    for output in outputs:
        read += output.cached_tokens
        replayed += output.replayed
        for seconds, tokens in (output.usage.created if output.usage else {}).items():
            written["ttl_30m_tokens" if seconds <= _SECONDS["30m"] else "ttl_12h_tokens"] += tokens
    total = {"cached_tokens": read, "cache_write_tokens": sum(written.values())}
    told = {"replayed_tokens": replayed} if replayed else {}
    return total | {"cache_write_tokens_details": written} | told
