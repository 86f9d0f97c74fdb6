"""Schemas by account and name. They live in the server's process; their KV lives in the tree, found by content."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import RametError
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.modules.compile import ModulePrompt
from runtime.reuse.modules.pml import read_prompt
from runtime.reuse.modules.schema import Mode, Schema
from server.http.answers import JsonList
from server.http.errors import NotFound

# Bounds for one account.
MAX_SCHEMAS = 256
MAX_SIZE = 1 << 22
# Memory of a module, and of each run of tokens in it, beside the tokens.
_TOKENS_OF_PART = 128


class SchemaConflict(RametError):
    """Another request is in the way: another schema has the name, there are too many, or this one went (HTTP 409)."""

    status = 409
    type = "conflict_error"


@dataclass(slots=True)
class Stored:
    """A schema of an account.

    Attributes:
        digest: of all that it was made from.
        modules: its layout.
        num_tokens: of all modules.
        num_runs: texts and parameters in all modules.
        expires_s: on the store's clock; None: never.
        pins: ids of the pins of its KV.
    """

    schema: Schema
    digest: str
    mode: Mode
    modules: JsonList
    num_tokens: int
    num_runs: int
    expires_s: float | None = None
    pins: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The memory that it takes, in tokens."""
        return self.num_tokens + (len(self.modules) + self.num_runs) * _TOKENS_OF_PART

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        """The schema for clients; `live`: ids of the pins that the engine has."""
        return {
            "id": self.schema.name,
            "object": "schema",
            "mode": self.mode,
            "length": self.schema.length,
            "tokens": self.num_tokens,
            "pins": [pin for pin in self.pins if pin in live],
            "expires_in_s": None if self.expires_s is None else round(self.expires_s - now_s, 1),
        }


def make(
    pml: str, mode: Mode, scaffolds: Sequence[Sequence[str]] | None, tokenizer: Tokenizer, context_length: int
) -> Stored:
    """A schema that is in no store yet. Raises PmlError."""
    schema = Schema.read(pml, tokenizer, context_length, mode, scaffolds)
    modules = JsonList()
    for module in schema.modules():
        modules.append(module)
    runs = [len(run.tokens) for scope in schema.root.walk() for run in scope.runs]
    digest = hashlib.sha256(json.dumps([pml, mode, scaffolds]).encode()).hexdigest()
    return Stored(schema, digest, mode, modules, sum(runs), len(runs))


class SchemaStore:
    """The schemas of all accounts; a schema that has expired, or is another account's, does not exist."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._schemas: dict[str, dict[str, Stored]] = {}

    def of(self, account: str) -> list[Stored]:
        """The schemas of an account, oldest first."""
        return [stored for stored in self._schemas.get(account, {}).values() if self._lives(stored)]

    def get(self, account: str, name: str) -> Stored:
        """A schema by its name; thread-safe. Raises NotFound."""
        stored = self._schemas.get(account, {}).get(name)
        if stored is None or not self._lives(stored):
            raise NotFound(f"there is no schema {name!r}", param="schema", code="schema_not_found")
        return stored

    def put(self, account: str, new: Stored, ttl_s: float | None) -> tuple[Stored, bool]:
        """Keep a schema, from now on for `ttl_s`; returns the kept one, and whether it is new.

        Raises:
            SchemaConflict: if a different schema has the name, or over the account's bounds.
        """
        kept = {stored.schema.name: stored for stored in self.of(account)}
        known = kept.get(new.schema.name)
        if known is not None and known.digest != new.digest:
            message = f"there is another schema {new.schema.name!r}; delete it first"
            raise SchemaConflict(message, param="pml", code="schema_exists")
        if known is None:
            size = sum(stored.size for stored in kept.values()) + new.size
            if len(kept) == MAX_SCHEMAS or size > MAX_SIZE:
                message = (
                    f"one client may keep {MAX_SCHEMAS} schemas with {MAX_SIZE} tokens in all, "
                    f"where a module, and each text and parameter in it, counts for {_TOKENS_OF_PART} more"
                )
                raise SchemaConflict(message, param="pml", code="too_many_schemas")
        stored = kept[new.schema.name] = known or new
        stored.expires_s = None if ttl_s is None else self.clock() + ttl_s
        self._schemas[account] = kept
        return stored, known is None

    def remove(self, account: str, name: str) -> Stored:
        """Forget a schema and return it; requests that use it go on. Raises NotFound."""
        stored = self.get(account, name)
        del self._schemas[account][name]
        return stored

    def holds(self, account: str, stored: Stored) -> bool:
        """Whether this very schema is kept, and no other one of its name."""
        return self._schemas.get(account, {}).get(stored.schema.name) is stored

    def drop(self, account: str, stored: Stored) -> None:
        """Forget this very schema, if it is still kept."""
        if self.holds(account, stored):
            del self._schemas[account][stored.schema.name]

    def compile(self, account: str, pml: str) -> ModulePrompt:
        """The request of a prompt, by the schema that it names; thread-safe. Raises PmlError and NotFound."""
        prompt = read_prompt(pml)
        return self.get(account, prompt.schema).schema.compile(prompt)

    def _lives(self, stored: Stored) -> bool:
        return stored.expires_s is None or self.clock() < stored.expires_s
