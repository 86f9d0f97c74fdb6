"""A schema, laid out for one model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from runtime.features.chunks.ask import ChunksAsk, Mode, ModuleAsk, ReuseParams
from runtime.features.chunks.schemas.compile import ModulePrompt, compile_prompt
from runtime.features.chunks.schemas.layout import Scope, lay_out, make_entry
from runtime.features.chunks.schemas.markup import PmlError, Text
from runtime.features.chunks.schemas.pml import Content, Prompt, SchemaText, read_prompt, read_schema
from runtime.features.chunks.schemas.roles import continue_chat, template_pieces
from runtime.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema, laid out for one model; see `read`.

    Attributes:
        name: the schema's name, which prompts refer to.
        root: the schema's layout.
        scaffolds: sets of scopes that are encoded together, the largest first.
        repair: see `ModulePrompt`.
        roles: roles of the schema's messages; empty without messages.
        end: the chat template's text after the schema's last message.
        tokenizer: the model's tokenizer.
        limit: largest number of positions of a prompt.
    """

    name: str
    root: Scope
    scaffolds: list[list[Scope]]
    repair: ReuseParams | None
    roles: list[str]
    end: str
    tokenizer: Tokenizer
    limit: int

    @classmethod
    def read(
        cls,
        pml: str,
        tokenizer: Tokenizer,
        context_length: int,
        mode: Mode = "independent",
        scaffolds: Sequence[Sequence[str]] | None = None,
    ) -> Schema:
        """Parse a schema and lay it out.

        Args:
            pml: the schema's text.
            tokenizer: the model's tokenizer.
            context_length: the model's context; the schema must leave a position for a prompt.
            mode: independent: each module is encoded alone. nested: each module is encoded after the earlier texts of
                the schema and of the modules around it. scaffold: sets of modules are also encoded together; a prompt
                that imports a whole set reads this encoding.
            scaffolds: the sets, as lists of paths. Default: one set, of everything outside of unions, and of each union
                the member in its attribute `scaffold`.

        Raises:
            PmlError: if the schema cannot be served.
        """
        text = read_schema(pml)
        pieces = template_pieces(tokenizer, [role.role for role in text.roles]) if text.roles else []
        bos = [] if text.roles else tokenizer.leading_ids
        root = lay_out(_flat(text, pieces), tokenizer, context_length - 1, array("i", bos), mode == "nested")
        if mode != "scaffold" and scaffolds is not None:
            raise PmlError("scaffolds need the mode scaffold")
        sets = []
        if mode == "scaffold":
            sets = [list(_default_scaffold(root))] if scaffolds is None else _scaffolds(scaffolds, root)
        roles = [role.role for role in text.roles]
        return cls(text.name, root, sets, text.repair, roles, pieces[-1] if pieces else "", tokenizer, context_length)

    @property
    def length(self) -> int:
        """Number of positions before the text of prompts."""
        return self.root.stop

    def compile(self, prompt: str | Prompt, generate: bool = True) -> ModulePrompt:
        """Compile a prompt to a request.

        Args:
            prompt: PML, or a parsed prompt.
            generate: in a conversation, whether the assistant's turn begins at the end.

        Raises:
            PmlError: if the prompt does not fit the schema.
        """
        if isinstance(prompt, str):
            prompt = read_prompt(prompt)
        if prompt.schema != self.name:
            raise PmlError(f"the prompt names the schema {prompt.schema!r}, and not {self.name!r}")
        tail = self._tail(prompt, generate)
        compiled = compile_prompt(prompt, tail, self.root, self.scaffolds, self.tokenizer, self.limit)
        return replace(compiled, repair=self.repair)

    def everything(self) -> ModulePrompt:
        """A request that only encodes every module and all scaffolds.

        Members of a union that have the same text share one entry, which has all their names.
        """
        unique: dict[bytes, tuple[ModuleAsk, int]] = {}
        for scopes in (*self.scaffolds, *([scope] for scope in self.root.walk())):
            if kept := sum(scope.num_kept for scope in scopes):
                entry = make_entry(scopes)
                first, _ = unique.setdefault(
                    msgspec.msgpack.encode((entry.tokens, entry.anchors, entry.holes)), (entry, kept)
                )
                if first is not entry:
                    first.name += f", {entry.name}"
        ask = ChunksAsk(modules=[entry for entry, _ in unique.values()], schema=self.name)
        return ModulePrompt([], ask, [kept for _, kept in unique.values()], 0)

    def _tail(self, prompt: Prompt, generate: bool) -> str:
        if not self.roles:
            if prompt.messages:
                raise PmlError("a schema without <system>, <user> and <assistant> takes no messages")
            return prompt.text
        messages = prompt.messages
        if prompt.text.strip():
            messages = [{"role": "user", "content": prompt.text.strip()}]
        return continue_chat(self.tokenizer, self.roles, self.end, messages, generate)

    def modules(self) -> list[dict[str, Any]]:
        """The schema's own text and each module: path, positions, tokens, parameters, union."""
        return [_describe(scope) for scope in self.root.walk()]


def _flat(text: SchemaText, pieces: list[str]) -> Content:
    """The content of a schema with the template's text in it. Adjacent texts are joined, and tokenized as one."""
    if not text.roles:
        return text.content
    flat: Content = [Text(pieces[0])]
    for role, piece in zip(text.roles, pieces[1:], strict=True):
        for node in (*role.content, Text(piece)):
            if isinstance(node, Text) and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].text + node.text, node.line)
            else:
                flat.append(node)
    return flat


def _default_scaffold(scope: Scope) -> Iterator[Scope]:
    yield scope
    for name, child in scope.children.items():
        if child.union is None or child.union.scaffold == name:
            yield from _default_scaffold(child)


def _scaffolds(paths: Sequence[Sequence[str]], root: Scope) -> list[list[Scope]]:
    """Sets of scopes by their paths, each in the order of the schema. Raises PmlError."""
    known = {scope.path: scope for scope in root.walk()}
    sets = []
    for given in paths:
        for path in given:
            if path not in known:
                raise PmlError("a scaffold names a module that the schema does not have", path)
        wanted = set(given)
        scopes = [scope for path, scope in known.items() if path in wanted]
        chosen: dict[int, Scope] = {}
        for one in (one for scope in scopes for one in scope.lineage() if one.union is not None):
            if (other := chosen.setdefault(id(one.union), one)) is not one:
                raise PmlError(f"the scaffold also has {other.path}, of the same union", one.path)
        sets.append(scopes)
    return sorted(sets, key=len, reverse=True)


def _describe(scope: Scope) -> dict[str, Any]:
    parameters = [
        {"name": name, "start": run.position, "length": len(run.tokens)} for name, run in scope.parameters.items()
    ]
    described = {"path": scope.path, "start": scope.start, "stop": scope.stop, "tokens": scope.num_kept}
    union = scope.union and {"start": scope.union.start, "stop": scope.union.stop}
    return {**described, "parameters": parameters, "union": union}
