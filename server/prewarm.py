"""Prompts that a server computes, or loads from a tier, when it starts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pydantic import ValidationError

from runtime.errors import EngineDead, Overloaded, RametError
from runtime.frontend.output import Output
from server.admin.cache import Prefix
from server.auth.keys import EVERYONE
from server.documents.store import DocumentStore
from server.generation.service import GenerationService

log = logging.getLogger("ramet.server")

_PAUSE_S = 1.0


class BadPrewarm(RametError):
    """`--prewarm` cannot be read."""


def read_prewarm(path: Path | None) -> list[Prefix]:
    """The prompts of a JSONL file, with the fields of `/cache/pin`. Raises BadPrewarm."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPrewarm(
            f"--prewarm {path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(Prefix.model_validate_json(line))
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"]))
            raise BadPrewarm(f"--prewarm {path}, line {number}: {field or 'JSON'}: {problem['msg']}") from None
        if found[-1].num_given != 1:
            raise BadPrewarm(f"--prewarm {path}, line {number}: exactly one of text, input_ids and messages is needed")
    return found


async def prewarm(prefixes: list[Prefix], service: GenerationService, documents: DocumentStore) -> None:
    """Compute or load prompts, one after another, so that those of clients wait for one at most."""
    tokens = cached = 0
    for number, prefix in enumerate(prefixes, start=1):
        try:
            done = await _one(prefix, service, documents)
        except EngineDead:
            return
        except RametError as error:
            log.warning("--prewarm: prompt %d is left out: %s", number, error.message)
            continue
        tokens, cached = tokens + done.prompt_tokens, cached + done.cached_tokens
    if prefixes:
        log.info("--prewarm: %d prompts of %d tokens are there, %d of these from the cache", number, tokens, cached)


async def _one(prefix: Prefix, service: GenerationService, documents: DocumentStore) -> Output:
    while True:
        try:
            return await service.run(None, prefix.prefix(EVERYONE, service.context, documents, new_tokens=0))
        except Overloaded:
            await asyncio.sleep(_PAUSE_S)
