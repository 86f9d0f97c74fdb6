"""Schemas by account and name. They live in the server's process; their KV lives in the tree, found by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.models.tokenizer import Tokenizer
from runtime.reuse.modules.compile import ModulePrompt
from runtime.reuse.modules.pml import read_prompt
from runtime.reuse.modules.schema import Mode, Schema
from server.http.answers import JsonList
from server.store import Lease, Store

# Memory of a module, and of each run of tokens in it, beside the tokens.
_TOKENS_OF_PART = 128


@dataclass(slots=True)
class StoredSchema:
    """A schema of an account.

    Attributes:
        digest: of all that it was made from.
        modules: its layout.
        num_tokens: of all modules.
        num_runs: texts and parameters in all modules.
    """

    schema: Schema
    digest: str
    mode: Mode
    modules: JsonList
    num_tokens: int
    num_runs: int
    lease: Lease = field(default_factory=Lease)

    @property
    def id(self) -> str:
        return self.schema.name

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
            **self.lease.describe(now_s, live),
        }


def make(
    pml: str, mode: Mode, scaffolds: Sequence[Sequence[str]] | None, tokenizer: Tokenizer, context_length: int
) -> StoredSchema:
    """A schema that is in no store yet. Raises PmlError."""
    schema = Schema.read(pml, tokenizer, context_length, mode, scaffolds)
    modules = JsonList()
    for module in schema.modules():
        modules.append(module)
    runs = [len(run.tokens) for scope in schema.root.walk() for run in scope.runs]
    digest = hashlib.sha256(json.dumps([pml, mode, scaffolds]).encode()).hexdigest()
    return StoredSchema(schema, digest, mode, modules, sum(runs), len(runs))


class SchemaStore(Store[StoredSchema]):
    """The schemas of all accounts."""

    noun, source = "schema", "pml"
    most, most_size = 256, 1 << 22
    bounds = (
        f"{most} schemas with {most_size} tokens in all, "
        f"where a module, and each text and parameter in it, counts for {_TOKENS_OF_PART} more"
    )

    def compile(self, account: str, pml: str) -> ModulePrompt:
        """The request of a prompt, by the schema that it names; thread-safe. Raises PmlError and NotFound."""
        prompt = read_prompt(pml)
        return self.get(account, prompt.schema).schema.compile(prompt)
