"""Reads XML to elements with line numbers. No DTD, entities or namespaces; depth, elements and text are bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from runtime.errors import InvalidRequest

MAX_CHARACTERS = 4 << 20
MAX_ELEMENTS = 12_000
MAX_DEPTH = 32
MAX_ATTRIBUTES = 1024
_SPACE = " \t\r\n"
_MAX_QUOTED = 100
# Finds tags with too many attributes before parsing: expat parses a tag without releasing the interpreter lock.
_ATTRIBUTE = r"""\s++[^\s"'<=]++\s*+=\s*+(?:"[^"<]*+"|'[^'<]*+')"""
_CROWDED = re.compile(rf"<[^\s<]*+(?:{_ATTRIBUTE}){{{MAX_ATTRIBUTES + 1}}}")
# Tags that are not part of a module's path.
_INNER = frozenset({"union", "system", "user", "assistant"})


class PmlError(InvalidRequest):
    """PML that cannot be served; the message begins with the module's path and the line."""

    def __init__(self, message: str, path: str = "", line: int | None = None):
        path = path if len(path) <= _MAX_QUOTED else f"{path[:_MAX_QUOTED]} ..."
        where = ", ".join(filter(None, (path, f"line {line}" if line else "")))
        super().__init__(f"{where}: {message}" if where else message, param="pml", code="invalid_pml")


@dataclass(slots=True)
class Text:
    """Characters between two tags, as written."""

    text: str
    line: int | None = None

    @property
    def blank(self) -> bool:
        """Whether it is only white space."""
        return not self.text.strip(_SPACE)


@dataclass(slots=True)
class Element:
    tag: str
    attributes: dict[str, str]
    line: int
    content: list[Element | Text] = field(default_factory=list)

    def without_blanks(self, inline: frozenset[str] = frozenset()) -> list[Element | Text]:
        """The content without white space, except between two elements whose tags are in `inline`."""

        def counts(index: int) -> bool:
            around = self.content[max(index - 1, 0) : index + 2 : 2] if index else []
            return len(around) == 2 and all(isinstance(node, Element) and node.tag in inline for node in around)

        return [n for i, n in enumerate(self.content) if isinstance(n, Element) or not n.blank or counts(i)]


class _Reader:
    """Collects the elements that expat reports."""

    def __init__(self) -> None:
        # Without namespace processing: otherwise a namespace of a megabyte would be part of every name.
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.CharacterDataHandler = self._data
        self.parser.EndElementHandler = self._end
        self.parser.StartDoctypeDeclHandler = self._refuse
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count = 0
        self._text: list[str] = []
        self._line = 0

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._end_text()
        self._count += 1
        element = Element(tag, attributes, self.parser.CurrentLineNumber)
        if self._count > MAX_ELEMENTS:
            raise PmlError(f"there are more than {MAX_ELEMENTS} elements", self.path, element.line)
        if len(self._open) == MAX_DEPTH:
            raise PmlError(f"elements are nested more than {MAX_DEPTH} deep", self.path, element.line)
        if self._open:
            self._open[-1].content.append(element)
        else:
            self.root = element
        self._open.append(element)

    @property
    def path(self) -> str:
        """Path of the innermost open module; empty before the root."""
        names = [element.attributes.get("name", element.tag) for element in self._open[1:] if element.tag not in _INNER]
        return f"/{'/'.join(names)}" if self._open else ""

    def _data(self, text: str) -> None:
        self._line = self._line if self._text else self.parser.CurrentLineNumber
        self._text.append(text)

    def _end(self, tag: str) -> None:
        self._end_text()
        self._open.pop()

    def _end_text(self) -> None:
        # Comments cut text into pieces, which must be joined to see whether the text is blank.
        if self._text:
            self._open[-1].content.append(Text("".join(self._text), self._line))
            self._text = []

    def _refuse(self, *_: Any) -> None:
        raise PmlError("a document type and entities are not allowed", line=self.parser.CurrentLineNumber)


def read_xml(text: str) -> Element:
    """Parse a document; returns its root. Raises PmlError."""
    if len(text) > MAX_CHARACTERS:
        raise PmlError(f"the text has {len(text)} characters; the limit is {MAX_CHARACTERS}")
    if found := _CROWDED.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise PmlError(f"an element has more than {MAX_ATTRIBUTES} attributes", line=line)
    reader = _Reader()
    try:
        reader.parser.Parse(text, True)
    except expat.ExpatError as error:
        raise PmlError(f"this is not XML: {expat.ErrorString(error.code)}", reader.path, error.lineno) from None
    except UnicodeEncodeError:
        raise PmlError("a lone surrogate is not Unicode text") from None
    assert reader.root is not None
    return reader.root
