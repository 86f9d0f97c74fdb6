"""Parses the Prompt Markup Language: schemas (section 3.2 of the paper), and prompts that use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import ReuseParams
from runtime.features.chunks.schemas.markup import Element, PmlError, Text, read_xml

ROLES = ("system", "user", "assistant")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_\-.]{0,63}")
_PARAMETERS = frozenset(("parameter", "param"))
# Attributes of a schema: options of its attribute `repair`.
_REPAIR = ("ratio", "granularity", "k", "max_kl")
# Modules cannot have these names, which are tags of their own.
RESERVED = frozenset((*ROLES, *_PARAMETERS, "schema", "prompt", "module", "union"))


@dataclass(slots=True)
class Parameter:
    """A place in a module for an argument of up to `length` tokens; `scaffold`: text to encode in its place."""

    name: str
    length: int
    scaffold: str
    line: int


@dataclass(slots=True)
class Module:
    name: str
    content: Content
    line: int


@dataclass(slots=True, eq=False)
class Union:
    """Modules of which a prompt may import one; `scaffold`: the member in the default scaffold, empty for none."""

    members: list[Module]
    scaffold: str
    line: int


Node = Text | Parameter | Module | Union
Content = list[Node]


@dataclass(slots=True)
class Role:
    """A message of a conversation, part of a schema."""

    role: str
    content: Content


@dataclass(slots=True)
class SchemaText:
    """A schema as written: either `content`, or the messages of a conversation; `repair`: see `ModulePrompt`."""

    name: str
    content: Content
    roles: list[Role]
    repair: ReuseParams | None


@dataclass(slots=True)
class Import:
    """A module that a prompt imports; `path`: its name after those of the modules around it."""

    path: tuple[str, ...]
    arguments: dict[str, str] = field(default_factory=dict)
    line: int | None = None


@dataclass(slots=True)
class Insert:
    """Text between imports, placed at the end of the module `path` if `behind`, else at the module's beginning."""

    text: str
    path: tuple[str, ...]
    behind: bool
    line: int | None


@dataclass(slots=True)
class Prompt:
    """A prompt as written: imports and the text between them, then text or messages of a conversation."""

    schema: str
    imports: list[Import] = field(default_factory=list)
    inserts: list[Insert] = field(default_factory=list)
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)


def read_schema(pml: str) -> SchemaText:
    """Parse a schema. Raises PmlError."""
    root = read_xml(pml)
    if root.tag != "schema":
        raise PmlError(f"a schema begins with <schema>, not with <{root.tag}>", line=root.line)
    given = _attributes(root, "/", "name", optional=("repair", *_REPAIR))
    name, repair = given["name"], _repair(given, root.line)
    _check_name(name, "/", root.line)
    names: set[str] = set()
    roles = [n for n in root.content if isinstance(n, Element) and n.tag in ROLES]
    if not roles:
        return SchemaText(name, _content(root, (), names), [], repair)
    for node in root.without_blanks():
        if not isinstance(node, Element) or node.tag not in ROLES:
            raise PmlError(
                "all content of a schema with roles must be in <system>, <user> or <assistant>", "/", node.line
            )
        _attributes(node, "/")
    return SchemaText(name, [], [Role(r.tag, _trimmed(_content(r, (), names))) for r in roles], repair)


def _repair(given: dict[str, str], line: int) -> ReuseParams | None:
    """The repair that the attributes of a schema ask."""
    options = {name: given[name] for name in _REPAIR if name in given}
    if "repair" not in given:
        for name in options:
            raise PmlError(f"the attribute {name!r} needs repair", "/", line)
        return None
    try:
        asked = ReuseParams.model_validate({"method": given["repair"], **options})
        asked.check()
    except ValidationError as error:
        problem = error.errors()[0]
        name = "repair" if problem["loc"] == ("method",) else str(problem["loc"][0])
        raise PmlError(f"{name}: {problem['msg']}", "/", line) from None
    except InvalidRequest as error:
        raise PmlError(error.message, "/", line) from None
    return asked


def _content(element: Element, path: tuple[str, ...], names: set[str]) -> Content:
    """The content of a schema, a role or a module; `names`: collects the names of its modules, which are unique."""
    content: Content = []
    parameters: set[str] = set()
    for node in element.without_blanks(_PARAMETERS):
        if isinstance(node, Text):
            content.append(node)
        elif node.tag == "module":
            content.append(_module(node, path, names))
        elif node.tag == "union":
            content.append(_union(node, path, names))
        elif node.tag in _PARAMETERS and path:
            content.append(_parameter(node, _show(path), parameters))
        else:
            raise PmlError(f"<{node.tag}> cannot stand in <{element.tag}>", _show(path), node.line)
    return content


def _module(element: Element, path: tuple[str, ...], names: set[str]) -> Module:
    name = _attributes(element, _show(path), "name")["name"]
    path = (*path, name)
    _check_name(name, _show(path), element.line)
    if name in RESERVED:
        raise PmlError(f"{name!r} is a tag and cannot be a module's name", _show(path), element.line)
    if name in names:
        raise PmlError(f"there are two modules {name!r} in the same scope", _show(path), element.line)
    names.add(name)
    return Module(name, _content(element, path, set()), element.line)


def _union(element: Element, path: tuple[str, ...], names: set[str]) -> Union:
    scaffold = _attributes(element, _show(path), optional=("scaffold",)).get("scaffold", "")
    members = []
    for node in element.without_blanks():
        if not isinstance(node, Element) or node.tag != "module":
            raise PmlError("a union may only contain modules", _show(path), node.line)
        members.append(_module(node, path, names))
    if not members:
        raise PmlError("a union needs a module", _show(path), element.line)
    if scaffold and scaffold not in (member.name for member in members):
        raise PmlError(f"the union has no module {scaffold!r}", _show(path), element.line)
    return Union(members, scaffold, element.line)


def _parameter(element: Element, path: str, names: set[str]) -> Parameter:
    given = _attributes(element, path, "name", optional=("length", "len", "scaffold"))
    name, lengths = given["name"], [given[key] for key in ("length", "len") if key in given]
    _check_name(name, path, element.line)
    if len(lengths) != 1 or not re.fullmatch(r"[1-9][0-9]{0,6}", lengths[0]):
        raise PmlError(
            f'parameter {name!r} needs a length in tokens below 10,000,000, such as length="5"', path, element.line
        )
    if name in names:
        raise PmlError(f"there are two parameters {name!r}", path, element.line)
    if element.without_blanks():
        raise PmlError(f"parameter {name!r} cannot hold anything", path, element.line)
    names.add(name)
    return Parameter(name, int(lengths[0]), given.get("scaffold", ""), element.line)


def _attributes(element: Element, path: str, *needed: str, optional: tuple[str, ...] = ()) -> dict[str, str]:
    for name in element.attributes.keys() - {*needed, *optional}:
        raise PmlError(f"<{element.tag}> has no attribute {name!r}", path, element.line)
    for name in needed:
        if name not in element.attributes:
            raise PmlError(f"<{element.tag}> needs the attribute {name!r}", path, element.line)
    return element.attributes


def _check_name(name: str, path: str, line: int) -> None:
    if not _NAME.fullmatch(name):
        raise PmlError(
            f"{name[:80]!r} is not a name: a letter or _, then up to 63 letters, digits, _, - and .", path, line
        )


def _show(path: tuple[str, ...]) -> str:
    return "/" + "/".join(path)


def _trimmed(content: Content) -> Content:
    """A message's content without white space at both ends, as chat templates strip it."""
    if content and isinstance(first := content[0], Text):
        content = [Text(first.text.lstrip(), first.line), *content[1:]]
    if content and isinstance(last := content[-1], Text):
        content = [*content[:-1], Text(last.text.rstrip(), last.line)]
    return content


def read_prompt(pml: str) -> Prompt:
    """Parse a prompt, without comparing it with its schema. Raises PmlError."""
    root = read_xml(pml)
    if root.tag != "prompt":
        raise PmlError(f"a prompt begins with <prompt>, not with <{root.tag}>", line=root.line)
    prompt = Prompt(_attributes(root, "", "schema")["schema"])
    content = root.without_blanks()
    places = [i for i, node in enumerate(content) if isinstance(node, Element) and node.tag not in ROLES]
    behind = places[-1] + 1 if places else 0
    for one in _references(content[:behind], ()):
        if isinstance(one, Import):
            prompt.imports.append(one)
        else:
            prompt.inserts.append(one)
    tail = content[behind:]
    roles = [node for node in tail if isinstance(node, Element)]
    if not roles:
        prompt.text = "".join(node.text for node in tail if isinstance(node, Text)).rstrip()
        return prompt
    for node in tail:
        if isinstance(node, Text):
            raise PmlError("there is text outside of <system>, <user> and <assistant>", line=node.line)
    prompt.messages = [_message(role) for role in roles]
    return prompt


def _references(content: list[Element | Text], path: tuple[str, ...]) -> Iterator[Import | Insert]:
    last, behind = path, False
    for node in content:
        if isinstance(node, Text):
            yield Insert(node.text, last, behind, node.line)
        elif node.tag in ROLES:
            raise PmlError(f"<{node.tag}> must follow the last module of the prompt", _show(path), node.line)
        else:
            last, behind = (*path, node.tag), True
            yield Import(last, node.attributes, node.line)
            yield from _references(node.without_blanks(), last)


def _message(role: Element) -> dict[str, Any]:
    _attributes(role, "")
    for node in role.content:
        if isinstance(node, Element):
            raise PmlError(f"<{role.tag}> of a prompt takes only text; import <{node.tag}> before it", line=node.line)
    return {"role": role.tag, "content": "".join(n.text for n in role.content if isinstance(n, Text)).strip()}
