"""Prompt programs: Python functions that are compiled to PML.

What a function yields becomes text, a condition becomes a module, alternatives become a union, a call of another
program becomes a nested module, and an argument with a length a parameter. Other arguments decide conditions.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from runtime.features.chunks.schemas.pml import RESERVED, ROLES

Values = dict[str, Any]


def prompt_program(**lengths: int) -> Callable[[Callable[..., Iterator[str]]], Program]:
    """A decorator for generator functions; `lengths`: arguments that are text, with the most tokens of each.

    >>> @prompt_program(days=4)
    ... def trip(days, city):
    ...     yield f"Plan a trip of {days}."
    ...     match city:
    ...         case "rome":
    ...             yield "Rome is old."
    ...         case "miami":
    ...             yield "Miami has beaches."
    >>> trip.prompt("Where do I begin?", days="3 days", city="rome")
    '<prompt schema="trip"><days days="3 days"/><rome/>Where do I begin?</prompt>'
    """
    return lambda function: Program(function, lengths)


def role(name: str) -> AbstractContextManager[None]:
    """`with role("user"):` makes a message of the yielded text; `name`: "system", "user" or "assistant"."""
    return nullcontext()


class Program:
    """Makes a schema of a function, and prompts of its calls. Calling the program yields the plain text.

    Raises:
        TypeError: from `schema` and `prompt`, if the function does more than text, conditions and calls.
    """

    def __init__(self, function: Callable[..., Iterator[str]], lengths: dict[str, int]):
        self.name = function.__name__
        self.signature = inspect.signature(function)
        self.lengths = lengths
        self.function = function
        for name in lengths.keys() - self.signature.parameters.keys():
            raise TypeError(f"{self.name} has no argument {name!r}")

    def __call__(self, *arguments: Any, **named: Any) -> Iterator[str]:
        return self.function(*arguments, **named)

    @cached_property
    def schema(self) -> str:
        """The schema in PML."""
        return f'<schema name="{self.name}">{"".join(node.schema() for node in self.body)}</schema>'

    def prompt(self, text: str = "", **arguments: Any) -> str:
        """The prompt of a call in PML; `text` follows the modules that the arguments choose."""
        bound = self.signature.bind(**arguments)
        bound.apply_defaults()
        imports = "".join(node.imports(bound.arguments) for node in self.body)
        return f'<prompt schema="{self.name}">{imports}{escape(text)}</prompt>'

    @cached_property
    def body(self) -> list[_Node]:
        """The function's statements."""
        return self._read([])

    def _read(self, callers: list[Program]) -> list[_Node]:
        if self in callers:
            raise TypeError(f"{self.name} calls itself")
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body
        assert isinstance(definition, ast.FunctionDef)
        closure = inspect.getclosurevars(self.function)
        known = {**closure.builtins, **self.function.__globals__, **closure.nonlocals}
        return _Reader(self, known, [*callers, self]).body(definition.body, bool(callers))


@dataclass(slots=True)
class _Leaf:
    """Text or a parameter; `markup`: its PML in the schema, `parameter`: the parameter's name."""

    markup: str
    parameter: str = ""

    def schema(self) -> str:
        return self.markup

    def imports(self, values: Values) -> str:
        return ""


@dataclass(slots=True)
class _Role:
    """A message."""

    tag: str
    body: list[_Node]

    def schema(self) -> str:
        return f"<{self.tag}>{''.join(node.schema() for node in self.body)}</{self.tag}>"

    def imports(self, values: Values) -> str:
        return "".join(node.imports(values) for node in self.body)


class _Union(_Role):
    """Modules of which a prompt imports the first whose condition holds."""

    def imports(self, values: Values) -> str:
        return next(filter(None, (member.imports(values) for member in self.body)), "")


@dataclass(slots=True)
class _Module:
    """A module; `when`: whether a prompt with these values imports it; `bind`: makes the values for its body."""

    name: str
    body: list[_Node]
    when: Callable[[Values], Any]
    bind: Callable[[Values], Values]

    def schema(self) -> str:
        return f'<module name="{self.name}">{"".join(node.schema() for node in self.body)}</module>'

    def imports(self, values: Values) -> str:
        if not self.when(values):
            return ""
        values = self.bind(values)
        names = [node.parameter for node in self.body if isinstance(node, _Leaf) and node.parameter]
        given = "".join(f" {n}={quoteattr(str(values[n]))}" for n in names if values[n] is not None)
        inner = "".join(node.imports(values) for node in self.body)
        return f"<{self.name}{given}>{inner}</{self.name}>" if inner else f"<{self.name}{given}/>"


_Node = _Leaf | _Role | _Module


class _Reader:
    """Reads the statements of a program; `known`: values of the names that are defined outside of it."""

    def __init__(self, program: Program, known: Values, callers: list[Program]):
        self._program = program
        self._known = known
        self._callers = callers
        self._names: set[str] = set()

    def body(self, statements: list[ast.stmt], in_module: bool) -> list[_Node]:
        """The nodes of a scope. Raises TypeError for statements that a prompt program cannot have."""
        outer, self._names = self._names, set() if in_module else self._names
        nodes = [node for statement in statements for node in self._statement(statement, in_module)]
        self._names = outer
        return nodes

    def _statement(self, statement: ast.stmt, in_module: bool) -> list[_Node]:
        match statement:
            case ast.Pass() | ast.Expr(ast.Constant(str())):  # the constant is a docstring
                return []
            case ast.Expr(ast.Yield(ast.expr() as value)):
                return self._text(value, in_module)
            case ast.Expr(ast.YieldFrom(ast.Call() as call)):
                return [self._call(call)]
            case ast.If():
                return [self._if(statement)]
            case ast.Match():
                return [self._match(statement)]
            case ast.With([ast.withitem(ast.Call(args=[ast.Constant(name)]))]) if name in ROLES and not in_module:
                return [_Role(name, self.body(statement.body, False))]
        raise self._wrong(statement)

    def _wrong(self, node: ast.AST) -> TypeError:
        line = self._program.function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
        return TypeError(f"{self._program.name}, line {line}: a prompt program cannot do {ast.unparse(node)[:80]!r}")

    def _text(self, value: ast.expr, in_module: bool) -> list[_Node]:
        parts = value.values if isinstance(value, ast.JoinedStr) else [value]
        nodes = [self._part(part.value if isinstance(part, ast.FormattedValue) else part) for part in parts]
        named = [node.parameter for node in nodes if node.parameter]
        # Only modules can have parameters, so text with a parameter becomes a module of its own.
        return [_Module(self._unique(named[0]), [*nodes], _always, _same)] if named and not in_module else [*nodes]

    def _part(self, part: ast.expr) -> _Leaf:
        lengths = self._program.lengths
        if isinstance(part, ast.Name) and part.id in lengths:
            return _Leaf(f'<parameter name="{part.id}" length="{lengths[part.id]}"/>', part.id)
        names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        if names & self._program.signature.parameters.keys():
            raise self._wrong(part)
        return _Leaf(escape(str(self._value(part)({}))))

    def _value(self, expression: ast.expr) -> Callable[[Values], Any]:
        code: CodeType = compile(ast.Expression(expression), self._program.name, "eval")
        return lambda values: eval(code, self._known, values)

    def _call(self, call: ast.Call) -> _Module:
        callee = self._value(call.func)({})
        if not isinstance(callee, Program):
            raise self._wrong(call)
        arguments = [self._value(argument) for argument in call.args]
        named = {keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg is not None}

        def bind(values: Values) -> Values:
            given = {name: value(values) for name, value in named.items()}
            bound = callee.signature.bind(*(value(values) for value in arguments), **given)
            bound.apply_defaults()
            return bound.arguments

        return _Module(self._unique(callee.name), callee._read(self._callers), _always, bind)

    def _if(self, statement: ast.If) -> _Node:
        members: list[_Node] = []
        while True:
            members.append(self._module(ast.unparse(statement.test), statement.body, self._value(statement.test)))
            match statement.orelse:
                case [ast.If() as other]:
                    statement = other
                    continue
                case [_, *_]:
                    members.append(self._module("otherwise", statement.orelse, _always))
            return _Union("union", members) if len(members) > 1 else members[0]

    def _match(self, statement: ast.Match) -> _Union:
        subject = self._value(statement.subject)
        members: list[_Node] = []
        for case in statement.cases:
            match case:
                case ast.match_case(ast.MatchValue(ast.Constant(value)), None):
                    members.append(self._module(str(value), case.body, _equals(subject, value)))
                case ast.match_case(ast.MatchAs(None, None), None):
                    members.append(self._module("otherwise", case.body, _always))
                case _:
                    raise self._wrong(case.pattern)
        return _Union("union", members)

    def _module(self, name: str, statements: list[ast.stmt], when: Callable[[Values], Any]) -> _Module:
        return _Module(self._unique(name), self.body(statements, True), when, _same)

    def _unique(self, text: str) -> str:
        """A module's name, made from source text and unique in its scope."""
        name = re.sub(r"[^a-zA-Z0-9_\-.]+", "_", text).strip("_")[:48]
        name = name if re.match(r"[a-zA-Z_]", name) and name not in RESERVED else f"_{name}"
        numbered = name
        count = 1
        while numbered in self._names:
            count += 1
            numbered = f"{name}_{count}"
        self._names.add(numbered)
        return numbered


def _always(values: Values) -> bool:
    return True


def _same(values: Values) -> Values:
    return values


def _equals(subject: Callable[[Values], Any], value: Any) -> Callable[[Values], Any]:
    return lambda values: subject(values) == value
