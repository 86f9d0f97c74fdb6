"""The layout of a schema: positions of its tokens (section 3.3 of the paper), and the entries that hold their KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from runtime.features.chunks.ask import ModuleAsk, Pairs
from runtime.features.chunks.schemas.markup import PmlError, Text
from runtime.features.chunks.schemas.pml import Content, Module, Parameter, Union
from runtime.models.tokenizer import Tokenizer

# Most tokens of all entries of a schema, including all members of unions and placeholders.
MAX_TOKENS = 1 << 20


@dataclass(slots=True)
class TokenRun:
    """Tokens at consecutive positions; `kept`: False for placeholders of a parameter, whose KV is not read."""

    position: int
    tokens: array[int]
    kept: bool = True


@dataclass(slots=True, eq=False)
class UnionPlace:
    """Positions of a union, as many as its longest member needs; `scaffold`: its member in the default scaffold."""

    start: int
    scaffold: str
    stop: int = 0


@dataclass(slots=True, eq=False)
class Scope:
    """The layout of a module, or of the schema itself. Children have scopes of their own.

    Attributes:
        path: names of the scopes around the module and its own, `/` for the schema.
        start, stop: positions from the first token up to `stop` (exclusive), including children.
        union: the union of which the module is a member.
        num_tokens: number of the scope's own tokens, including placeholders.
        runs_before: number of its parent's runs that it attends to; tokens_before: of tokens in all scopes around it.
        parameters: runs of placeholders by the parameter's name.
    """

    path: str
    start: int
    line: int | None = None
    parent: Scope | None = None
    union: UnionPlace | None = None
    num_tokens: int = 0
    runs_before: int = 0
    tokens_before: int = 0
    stop: int = 0
    children: dict[str, Scope] = field(default_factory=dict)
    runs: list[TokenRun] = field(default_factory=list)
    parameters: dict[str, TokenRun] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(len(run.tokens) for run in self.runs if run.kept)

    def lineage(self) -> Iterator[Scope]:
        """The scope, and all scopes around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def before(self) -> Iterator[TokenRun]:
        """The runs of the scopes around it that its own tokens attend to, by position."""
        for scope in reversed(list(self.lineage())):
            if scope.parent is not None:
                yield from scope.parent.runs[: scope.runs_before]

    def walk(self) -> Iterator[Scope]:
        """The scope, and all scopes within it, in the order of the schema."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def make_entry(scopes: Sequence[Scope]) -> ModuleAsk:
    """The entry of scopes that are encoded together, for `AddRequest.ask`. Final placeholders are left out.

    `holes` are the index ranges of rows that are not kept: placeholders, and runs of other scopes to attend to.
    """
    runs = sorted(chain.from_iterable(scope.runs for scope in scopes), key=lambda run: run.position)
    while runs and not runs[-1].kept:
        runs.pop()
    before = [run for scope in scopes for run in scope.before()]
    tokens, anchors = in_order([*before, *runs])
    holes: Pairs = []
    index = 0
    for place, run in enumerate([*before, *runs]):
        start, index = index, index + len(run.tokens)
        if place < len(before) or not run.kept:
            if holes and holes[-1][1] == start:  # merged, so that equal entries have equal messages
                start = holes.pop()[0]
            holes.append((start, index))
    name = " + ".join(scope.path for scope in scopes)
    return ModuleAsk(tokens.tobytes(), anchors, holes, name)


def in_order(runs: Iterable[TokenRun]) -> tuple[array[int], Pairs]:
    """The int32 tokens of runs, and their anchors: pairs (index, position), after which positions are consecutive."""
    tokens = array("i")
    anchors: Pairs = []
    behind = -1
    for run in runs:
        if run.position != behind:
            anchors.append((len(tokens), run.position))
        tokens.extend(run.tokens)
        behind = run.position + len(run.tokens)
    return tokens, anchors


def lay_out(content: Content, tokenizer: Tokenizer, limit: int, bos: array[int], nested: bool) -> Scope:
    """Lay out a schema; returns its scope, with the scopes of all modules.

    Args:
        content: content of the schema.
        tokenizer: tokenizes every text alone.
        limit: largest number of positions.
        bos: int32 tokens before everything else.
        nested: whether modules attend to earlier texts of the scopes around them.

    Raises:
        PmlError: if the layout exceeds `limit`, or a scaffold text is longer than its parameter.
    """
    texts = list(_texts(content))
    check_characters(max(map(len, texts), default=0), tokenizer, limit)
    root = Scope("/", 0)
    if bos:
        root.runs.append(TokenRun(0, bos))
    root.start = root.num_tokens = len(bos)
    _Placer(iter(tokenizer.encode_each(texts)), tokenizer.placeholder, limit, nested).place(root, content)
    return root


def check_characters(count: int, tokenizer: Tokenizer, limit: int) -> None:
    """Raise PmlError if `count` characters cannot fit into `limit` positions, however they are tokenized."""
    if count > (most := limit * tokenizer.longest_token):
        raise PmlError(f"a text has {count} characters; {limit} positions hold {most} at most")


def _texts(content: Content) -> Iterator[str]:
    """All texts, in the order in which `_Placer` meets them."""
    for node in content:
        match node:
            case Text():
                yield node.text
            case Parameter():
                yield node.scaffold
            case Module():
                yield from _texts(node.content)
            case Union():
                for member in node.members:
                    yield from _texts(member.content)


@dataclass(slots=True)
class _Placer:
    """Assigns positions to the nodes of a schema.

    Attributes:
        texts: tokens of all texts, in the order of the nodes.
        placeholder: the token of parameters; the unknown token, as in the paper, if the tokenizer has one.
    """

    texts: Iterator[list[int]]
    placeholder: int
    limit: int
    nested: bool
    num_tokens: int = 0

    def place(self, scope: Scope, content: Content) -> None:
        """Lay out the content of a scope from its start on."""
        position = scope.start
        for node in content:
            match node:
                case Text():
                    run = TokenRun(position, array("i", next(self.texts)))
                    position = self._add(scope, run, node.line)
                case Parameter():
                    run = TokenRun(position, self._stand_in(scope, node), kept=False)
                    scope.parameters[node.name] = run
                    position = self._add(scope, run, node.line)
                case Module():
                    position = self._child(scope, node, position)
                case Union():
                    union = UnionPlace(position, node.scaffold)
                    union.stop = position = max(self._child(scope, one, position, union) for one in node.members)
        scope.stop = position

    def _child(self, parent: Scope, module: Module, start: int, union: UnionPlace | None = None) -> int:
        path = f"{parent.path.rstrip('/')}/{module.name}"
        scope = parent.children[module.name] = Scope(path, start, module.line, parent, union)
        if self.nested:
            scope.runs_before, scope.tokens_before = len(parent.runs), parent.tokens_before + parent.num_tokens
            self._count(scope.tokens_before, scope, module.line)
        self.place(scope, module.content)
        return scope.stop

    def _add(self, scope: Scope, run: TokenRun, line: int | None) -> int:
        stop = run.position + len(run.tokens)
        if stop > self.limit:
            raise PmlError(f"the schema reaches position {stop}; the limit is {self.limit}", scope.path, line)
        self._count(len(run.tokens), scope, line)
        if run.tokens:
            scope.runs.append(run)
            scope.num_tokens += len(run.tokens)
        return stop

    def _count(self, tokens: int, scope: Scope, line: int | None) -> None:
        self.num_tokens += tokens
        if self.num_tokens > MAX_TOKENS:
            raise PmlError(f"more than {MAX_TOKENS} tokens are to be encoded, placeholders included", scope.path, line)

    def _stand_in(self, scope: Scope, parameter: Parameter) -> array[int]:
        tokens, length = array("i", next(self.texts)), parameter.length
        if len(tokens) > length:
            message = f"the scaffold of {parameter.name!r} has {len(tokens)} tokens; the parameter takes {length}"
            raise PmlError(message, scope.path, parameter.line)
        # Bounded, since a parameter's `length` may ask for gigabytes.
        return tokens + array("i", [self.placeholder]) * (min(length, self.limit + 1) - len(tokens))
