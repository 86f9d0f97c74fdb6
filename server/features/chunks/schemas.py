"""`/v1/schemas`: schemas by account and name, held in the server's process. Their KV is in the tree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from runtime.features.chunks.ask import Mode
from runtime.features.chunks.schemas.markup import MAX_CHARACTERS
from runtime.frontend.output import PartedPrompt
from runtime.models.tokenizer import Tokenizer
from server.features.chunks.precompute import Precompute
from server.features.chunks.routes import object_router
from server.features.chunks.store import Store, StoredObject
from server.generation.bodies import Scoped
from server.http.answers import JsonList
from server.http.body import Text, example

if TYPE_CHECKING:
    from runtime.features.chunks.schemas.compile import ModulePrompt
    from runtime.features.chunks.schemas.schema import Schema

# Memory of a module, and of each text or parameter in it, beside the tokens; in tokens.
_TOKENS_OF_PART = 128

Paths = Annotated[list[Text], Field(max_length=1024)]


@dataclass(kw_only=True)
class StoredSchema(StoredObject):
    """A stored schema; `modules`: its layout for answers."""

    schema: Schema
    mode: Mode
    modules: JsonList

    def encoding(self, kv: Scoped) -> ModulePrompt:
        return self.schema.everything()

    def describe(self, now_s: float, live: Container[str]) -> dict[str, Any]:
        own = {"id": self.id, "object": "schema", "mode": self.mode, "length": self.schema.length}
        return own | {"tokens": self.num_tokens} | super().describe(now_s, live)

    def details(self, prompt: PartedPrompt, cached: dict[str, int]) -> dict[str, Any]:
        assert prompt.ask is not None
        names = [entry.name for entry in prompt.ask.modules]
        by_path = {path: cached[entry] for entry in names for path in entry.split(", ")}
        return {"modules": self.modules, "cached_tokens": by_path}


class SchemaRequest(Precompute):
    """A schema in PML. `encode` and `pin` compute KV that requests with the same salt can read."""

    model_config = example(
        pml='<schema name="cities">You plan trips.<module name="miami">Miami is a city ...</module></schema>'
    )

    pml: Annotated[Text, Field(max_length=MAX_CHARACTERS)]
    mode: Mode = "independent"
    scaffolds: Annotated[list[Paths], Field(max_length=64)] | None = Field(
        None, description="mode scaffold: sets of modules to encode together; default: all modules outside of unions"
    )

    def read(self, tokenizer: Tokenizer, context_length: int) -> StoredSchema:
        from runtime.features.chunks.schemas.schema import Schema

        schema = Schema.read(self.pml, tokenizer, context_length, self.mode, self.scaffolds)
        modules = JsonList()
        for module in schema.modules():
            modules.append(module)
        runs = [len(run.tokens) for scope in schema.root.walk() for run in scope.runs]
        return StoredSchema(
            id=schema.name,
            digest=hashlib.sha256(json.dumps([self.pml, self.mode, self.scaffolds]).encode()).hexdigest(),
            size=sum(runs) + (len(modules) + len(runs)) * _TOKENS_OF_PART,
            num_tokens=sum(runs),
            schema=schema,
            mode=self.mode,
            modules=modules,
        )


class SchemaStore(Store[StoredSchema]):
    """The schemas of all accounts, with sizes in tokens."""

    noun, source = "schema", "pml"
    most, most_size = 256, 1 << 22
    bounds = (
        f"{most} schemas with {most_size} tokens in all, "
        f"where a module, and each text and parameter in it, counts for {_TOKENS_OF_PART} more"
    )

    def compile(self, account: str, pml: str) -> ModulePrompt:
        """Compile a PML prompt with the schema that it names; thread-safe. Raises PmlError and NotFound."""
        from runtime.features.chunks.schemas.pml import read_prompt

        prompt = read_prompt(pml)
        return self.get(account, prompt.schema).schema.compile(prompt)


router = object_router(SchemaStore, SchemaRequest, Scoped)
