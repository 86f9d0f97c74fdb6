"""Prompts whose beginnings are kept once they are computed, and the books of their tokens."""

from __future__ import annotations

from runtime.kv.cache import PagedCache
from runtime.protocol import CacheBooks, Place
from runtime.request import Request


def keep_prompt(request: Request, cache: PagedCache) -> None:
    """Keep the prefixes that a request names once its prompt is computed, and put the books of it into the request."""
    if request.strategy.keeps_prompts and request.sequence.num_computed < request.prompt_len:
        return
    places, request.keep = request.keep, []
    for place in places:
        tokens = request.tokens[: place.tokens]
        if not cache.enabled:
            place.reason = "the prefix cache is off"
        elif not request.strategy.keeps_prompts:
            place.reason = f"what a prompt computes with {request.strategy.name} is no prefix of other prompts"
        else:
            place.reason = cache.pins.keep(tokens, request.namespace, request.owner, place.ttl_s)
        if place.reason is None:
            place.kept = place.tokens // cache.page_size * cache.page_size
    request.books = books(request.num_prompt, max(request.cached_tokens, 0), places)


def books(prompt: int, read: int, places: list[Place]) -> CacheBooks:
    """The books of a prompt of so many tokens, of which `read` came from the cache."""
    created: dict[float, int] = {}
    done = read
    for place in sorted(places, key=lambda place: place.kept):
        if place.kept > done:
            ttl_s = max(other.ttl_s for other in places if other.kept >= place.kept)
            created[ttl_s] = created.get(ttl_s, 0) + place.kept - done
            done = place.kept
    return CacheBooks(read, created, prompt - done, places)
