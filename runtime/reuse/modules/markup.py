"""XML as elements with lines. Nothing expands: no DTD, no entities; depth, elements and characters are bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import ParseError
from xml.parsers.expat import ExpatError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from runtime.errors import InvalidRequest

MAX_CHARACTERS = 4 << 20
MAX_ELEMENTS = 12_000
MAX_DEPTH = 32
_SPACE = " \t\r\n"
_MAX_QUOTED = 100
# Tags that are no part of a module's path.
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
        """The content without text that is only white space, unless it stands between two elements of `inline` tags."""

        def counts(index: int) -> bool:
            around = self.content[max(index - 1, 0) : index + 2 : 2] if index else []
            return len(around) == 2 and all(isinstance(node, Element) and node.tag in inline for node in around)

        return [n for i, n in enumerate(self.content) if isinstance(n, Element) or not n.blank or counts(i)]


class _Target:
    """Collects elements as a parser calls `start`, `data` and `end`."""

    def __init__(self) -> None:
        self.expat: Any = None
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count = 0
        self._text: list[str] = []
        self._line = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._end_text()
        self._count += 1
        element = Element(tag, attributes, self.expat.CurrentLineNumber)
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
        """Of the innermost module that is open; empty before the root."""
        names = [element.attributes.get("name", element.tag) for element in self._open[1:] if element.tag not in _INNER]
        return f"/{'/'.join(names)}" if self._open else ""

    def data(self, text: str) -> None:
        self._line = self._line if self._text else self.expat.CurrentLineNumber
        self._text.append(text)

    def end(self, tag: str) -> None:
        self._end_text()
        self._open.pop()

    def _end_text(self) -> None:
        # A comment cuts text into pieces, which only together say whether they are blank.
        if self._text:
            self._open[-1].content.append(Text("".join(self._text), self._line))
            self._text = []

    def close(self) -> None:
        pass


def read_xml(text: str) -> Element:
    """The root of a document. Raises PmlError."""
    if len(text) > MAX_CHARACTERS:
        raise PmlError(f"{len(text)} characters exceed the {MAX_CHARACTERS} that are allowed")
    target = _Target()
    parser = DefusedXMLParser(target=target, forbid_dtd=True)
    target.expat = parser.parser
    try:
        parser.feed(text)
        parser.close()
    except DefusedXmlException:
        raise PmlError("a document type and entities are not allowed", line=target.expat.CurrentLineNumber) from None
    except (ParseError, ExpatError) as error:
        reason = str(error).partition(": line")[0]
        line = getattr(error, "position", (getattr(error, "lineno", None),))[0]
        raise PmlError(f"this is no XML: {reason}", target.path, line) from None
    except UnicodeEncodeError:
        raise PmlError("a lone surrogate is not Unicode text") from None
    assert target.root is not None
    return target.root
