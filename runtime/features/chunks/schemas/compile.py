"""Compiles prompts to requests: entries to read, and the prompt's own tokens (section 3.4 of the paper)."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec import UNSET, UnsetType

from runtime.asks import ReuseReport
from runtime.features.chunks.ask import ChunksAsk, ChunksReport, ReuseParams
from runtime.features.chunks.schemas.layout import Scope, TokenRun, check_characters, in_order, make_entry
from runtime.features.chunks.schemas.markup import PmlError
from runtime.features.chunks.schemas.pml import Import, Insert, Prompt
from runtime.frontend.output import PartedPrompt
from runtime.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModulePrompt(PartedPrompt):
    """A prompt that imports modules.

    Attributes:
        tokens: the prompt's own tokens, those of arguments and new text, by position.
        ask: see `AddRequest`.
        rows: number of rows that are read of each entry.
        stop: the position of the first generated token.
        repair: how the schema wants its modules' rows repaired, for requests that do not say; None: not at all.
        auto: why the method `auto` chose the prompt's method.
    """

    noun: ClassVar[str] = "modules"

    tokens: list[int]
    ask: ChunksAsk
    rows: list[int]
    stop: int
    repair: ReuseParams | None = None
    auto: str | UnsetType = UNSET

    @property
    def length(self) -> int:
        return sum(self.rows) + len(self.tokens)

    @property
    def positions(self) -> int:
        return self.stop

    @property
    def partial_pages(self) -> int:
        return len(self.rows) + 1

    @property
    def has_parts(self) -> bool:
        return True

    def report(self, engine: ReuseReport | None, cached_tokens: int) -> ReuseReport | None:
        if isinstance(engine, ChunksReport):
            engine.told(self.auto, UNSET)
        return engine


def compile_prompt(
    prompt: Prompt,
    tail: str,
    root: Scope,
    scaffolds: Sequence[Sequence[Scope]],
    tokenizer: Tokenizer,
    limit: int,
) -> ModulePrompt:
    """Place a prompt's own tokens among the modules that it imports.

    Args:
        prompt: imports, and text between them.
        tail: text after all modules.
        root: layout of the schema.
        scaffolds: sets of scopes, the largest first; a set is encoded together if the prompt imports all of it.
        tokenizer: the model's tokenizer.
        limit: largest number of positions.

    Raises:
        PmlError: if the prompt does not fit the schema.
    """
    imported = _resolve(prompt.imports, root)
    arguments = [(scope, name, text, at) for scope, at in imported.items() for name, text in _arguments(scope, at)]
    texts = [text for _, _, text, _ in arguments] + [insert.text for insert in prompt.inserts]
    texts.append(tail)
    check_characters(sum(map(len, texts)), tokenizer, limit)
    tokens = iter(map(array, "i" * len(texts), tokenizer.encode_each(texts)))
    own = [_argument(scope, name, next(tokens), at) for scope, name, _, at in arguments]
    occupied = sorted((run.position, len(run.tokens)) for scope in (root, *imported) for run in scope.runs)
    for insert in prompt.inserts:
        own.append(_insert(insert, next(tokens), root, occupied))
    own.append(TokenRun(root.stop, next(tokens)))
    if not own[-1].tokens:
        raise PmlError("a prompt needs text after its last module, which the answer continues")
    ids, anchors = in_order(sorted((run for run in own if run.tokens), key=lambda run: run.position))
    sets = [(scopes, sum(s.num_kept for s in scopes)) for scopes in _together([root, *imported], scaffolds)]
    entries = [make_entry(scopes) for scopes, kept in sets if kept]
    ask = ChunksAsk(modules=entries, anchors=anchors, schema=prompt.schema)
    rows = [kept for _, kept in sets if kept]
    return ModulePrompt(ids.tolist(), ask, rows, root.stop + len(own[-1].tokens))


def _resolve(imports: Sequence[Import], root: Scope) -> dict[Scope, Import]:
    """The imported scopes. Raises PmlError for unknown or repeated modules, missing parents, and clashes in a union."""
    imported: dict[Scope, Import] = {}
    chosen: dict[int, Scope] = {}
    for one in imports:
        scope = root
        for name in one.path:
            if name not in scope.children:
                raise PmlError(_unknown(name, scope, root), _show(one), one.line)
            scope = scope.children[name]
        if scope in imported or scope is root:
            raise PmlError("the module is imported twice" if one.path else "this is no module", _show(one), one.line)
        imported[scope] = one
        if scope.union is not None and (other := chosen.setdefault(id(scope.union), scope)) is not scope:
            raise PmlError(f"{other.path} is imported from the same union", _show(one), one.line)
    for scope, one in imported.items():
        if scope.parent is not root and scope.parent not in imported:
            assert scope.parent is not None
            raise PmlError(f"{scope.parent.path}, which holds the module, is not imported", _show(one), one.line)
    return imported


def _unknown(name: str, scope: Scope, root: Scope) -> str:
    elsewhere = next((other for other in root.walk() if other.path.endswith(f"/{name}")), None)
    if elsewhere is None or elsewhere.parent is None:
        return f"there is no module {name!r}"
    return f"there is no module {name!r} in {scope.path}; it is in {elsewhere.parent.path}: import it there"


def _show(one: Import) -> str:
    return "/" + "/".join(one.path)


def _arguments(scope: Scope, one: Import) -> list[tuple[str, str]]:
    for name in one.arguments:
        if name not in scope.parameters:
            raise PmlError(f"the module has no parameter {name!r}", scope.path, one.line)
    return list(one.arguments.items())


def _argument(scope: Scope, name: str, tokens: array[int], one: Import) -> TokenRun:
    place = scope.parameters[name]
    if len(tokens) > len(place.tokens):
        message = f"the argument of {name!r} has {len(tokens)} tokens; the parameter takes {len(place.tokens)}"
        raise PmlError(message, scope.path, one.line)
    return TokenRun(place.position, tokens)


def _insert(insert: Insert, tokens: array[int], root: Scope, occupied: list[tuple[int, int]]) -> TokenRun:
    """Place text between imports, and mark its positions as occupied. Raises PmlError if the text does not fit."""
    scope = root
    for name in insert.path:
        scope = scope.children[name]
    start = scope.stop if insert.behind else scope.start
    place = bisect_right(occupied, (start, -1))
    stop = occupied[place][0] if place < len(occupied) else root.stop
    if place and sum(occupied[place - 1]) > start:
        stop = start
    if len(tokens) > stop - start:
        message = f"the text has {len(tokens)} tokens; {stop - start} fit at position {start}"
        raise PmlError(message, scope.path, insert.line)
    insort(occupied, (start, len(tokens)))
    return TokenRun(start, tokens)


def _together(scopes: list[Scope], scaffolds: Sequence[Sequence[Scope]]) -> list[list[Scope]]:
    """Divide scopes into sets that are encoded together: complete scaffolds, and every other scope alone."""
    left = dict.fromkeys(scopes)
    sets = []
    for scaffold in scaffolds:
        if all(scope in left for scope in scaffold):
            sets.append(list(scaffold))
            for scope in scaffold:
                del left[scope]
    return [*sets, *([scope] for scope in left)]
