"""Documents and modules in chats: parts of messages, and fields of the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from runtime.errors import InvalidRequest
from runtime.frontend.output import Prompt
from server.features.chunks.given import GivenDocument, GivenDocuments
from server.features.chunks.schemas import SchemaStore
from server.features.parts import FeaturePart, Stores
from server.http.body import Body, JsonObject, Text


def _arguments(given: dict[str, Any]) -> dict[str, str]:
    for name, text in given.items():
        if not isinstance(text, str):
            raise ValueError(f"the argument {name!r} must be a string")
    return given


class ModuleImport(Body):
    """An import of a module of the request's schema."""

    path: Text = Field(max_length=4096, description="names of modules from the outermost one, for example plan/miami")
    args: Annotated[JsonObject, AfterValidator(_arguments)] = Field(
        default_factory=dict, description="arguments by parameter, as strings"
    )


class ModulePart(FeaturePart):
    """A content part that imports a module."""

    type: Literal["module"]
    module: ModuleImport


class DocumentPart(FeaturePart):
    """A content part that is a document."""

    type: Literal["document"]
    document: GivenDocument

    @property
    def given(self) -> GivenDocument:
        return self.document

    def check(self, role: str) -> None:
        if role not in ("system", "developer", "user"):
            raise ValueError(f"a message of role {role} cannot have documents")


class ChunkChat(Body):
    """The fields of a chat by which its prompt gets documents or modules.

    Attributes:
        PARTS: what messages with parts have, for errors.
        NAMES: see `GenerationBody`.
    """

    PARTS: ClassVar[str] = "modules or documents"
    NAMES: ClassVar[Mapping[str, str]] = {"pml": "messages"}

    schema_name: Text | None = Field(
        None, alias="schema", description="name of a schema before the messages; they may import its modules"
    )
    documents: GivenDocuments | None = Field(None, description="documents to put before the last user message's text")

    @property
    def characters_of_fields(self) -> int:
        """The number of characters in these fields, without stored documents."""
        return sum(document.num_characters for document in self.documents or ())

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` makes the prompt, and not the chat template alone."""
        return self.schema_name is not None

    def has_parts(self, parts: Sequence[FeaturePart]) -> bool:
        """Whether the prompt is no plain text; `parts`: those of all messages."""
        return self.is_compiled or bool(self.documents) or bool(parts)

    def check_parts(self, parts: Sequence[FeaturePart], is_plain: bool) -> None:
        """Raise InvalidRequest for fields that exclude each other.

        Args:
            parts: those of all messages.
            is_plain: whether other fields of the body want a plain prompt.
        """
        if not self.is_compiled and any(isinstance(part, ModulePart) for part in parts):
            raise InvalidRequest("parts of type module need a schema", param="schema")
        if self.is_compiled and (self.documents or any(isinstance(part, DocumentPart) for part in parts)):
            raise InvalidRequest("a schema and documents exclude each other", param="schema")
        if self.is_compiled and is_plain:
            raise InvalidRequest("a schema excludes template variables and truncation", param="schema")

    def add_parts(self, turns: list[dict[str, Any]]) -> None:
        """Put the parts of these fields into turns. Raises InvalidRequest."""
        if not self.documents:
            return
        last = next((turn for turn in reversed(turns) if turn["role"] == "user"), None)
        if last is None:
            raise InvalidRequest("documents need a message with role user", param="documents")
        said = last["content"]
        last["content"] = [*self.documents, *said] if isinstance(said, list) else [*self.documents, said]

    def compile(
        self,
        messages: Sequence[tuple[dict[str, Any], Sequence[FeaturePart]]],
        describe: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        add_generation_prompt: bool,
        account: str,
        stores: Stores,
    ) -> Prompt:
        """The prompt of a schema's modules and of messages; thread-safe. Raises InvalidRequest and NotFound.

        Args:
            messages: turns with their parts.
            describe: adds descriptions of tools to turns.
            add_generation_prompt: whether the prompt ends with the beginning of an answer.
            account: whose stored schemas are meant, and `stores` with them.
            stores: see above.
        """
        from runtime.features.chunks.schemas.pml import Import
        from runtime.features.chunks.schemas.pml import Prompt as ModuleText

        schema = stores[SchemaStore].get(account, str(self.schema_name)).schema
        if not schema.roles:
            raise InvalidRequest("a schema without <system>, <user> and <assistant> is for /generate", param="schema")
        modules = [[part.module for part in parts if isinstance(part, ModulePart)] for _, parts in messages]
        # A message that consists of imports makes no turn.
        turns = [turn for (turn, _), own in zip(messages, modules, strict=True) if turn["content"] or not own]
        imports = [Import(tuple(one.path.strip("/").split("/")), one.args) for own in modules for one in own]
        return schema.compile(ModuleText(schema.name, imports, messages=describe(turns)), add_generation_prompt)
