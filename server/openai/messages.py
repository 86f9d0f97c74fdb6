"""OpenAI's messages and their content parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from runtime.errors import InvalidRequest
from runtime.frontend.pictures import Pictures, joined
from runtime.json_text import check_texts
from server.features.parts import FeaturePart, GivenPart
from server.features.registry import MessagePart
from server.http.body import Body, ByType, OneOr, Text, Unusable
from server.http.fields import ANSWERED
from server.http.unknown_fields import MOST, shown
from server.openai.caching import ExplicitBreakpoint, Mark, unmarked
from server.openai.tools import MAX_TOOLS, ToolCall

# Most messages in a conversation, and most parts in a message.
MAX_MESSAGES = 4096

# Claude Code's system prompt begins with this line. It changes with each conversation, so that no other one could read
# the prompt's KV, and it tells the model nothing.
_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")


class TextPart(Body):
    """A text part of a message's content."""

    IGNORED = ANSWERED

    type: Literal["text", "input_text", "output_text"]
    text: Text
    prompt_cache_breakpoint: ExplicitBreakpoint | None = None


class RefusalPart(Body):
    """The text of an assistant's refusal."""

    IGNORED = ANSWERED

    type: Literal["refusal"]
    text: Text = Field(alias="refusal")


class ThinkingPart(Body):
    """The assistant's reasoning; chat templates get it as `reasoning_content`."""

    IGNORED = ANSWERED

    type: Literal["thinking"]
    thinking: Text


class ImagePart(Unusable):
    """An image, as a data URL. Models that do not see get a line of text in its place."""

    type: Literal["image_url", "input_image", "image"]
    image_url: Any = None
    detail: Any = None
    prompt_cache_breakpoint: ExplicitBreakpoint | None = None
    _images: Pictures | None = PrivateAttr(None)
    _mark: str | None = PrivateAttr(None)
    _base64: tuple[str, str] | None = PrivateAttr(None)
    _fetched: bytes | None = PrivateAttr(None)

    @classmethod
    def of_base64(cls, data: str, media_type: str) -> ImagePart:
        part = cls(type="image")
        part._base64 = data, media_type
        return part

    @property
    def text(self) -> str:
        """What the prompt's text has for it. Raises InvalidRequest for an image that cannot be served."""
        if self._images is None:
            return super().text
        if self._mark is None and self._fetched is not None:
            self._mark = self._images.add(self._fetched)
        elif self._mark is None and self._base64 is not None:
            self._mark = self._images.add_base64(*self._base64)
        elif self._mark is None and self.url:
            self._mark = self._images.add_url(self.url)
        elif self._mark is None:
            message = "an image needs a data URL as image_url, or base64 as Anthropic's source; it has neither"
            raise InvalidRequest(message, param=self._images.param, code="invalid_image")
        return self._mark

    @property
    def url(self) -> str:
        given = self.image_url.get("url") if isinstance(self.image_url, dict) else self.image_url
        return given if isinstance(given, str) else ""

    def take(self, fetched: Mapping[str, bytes]) -> None:
        """Take the image from those that were fetched, by their URLs."""
        self._fetched = fetched.get(self.url)

    @property
    def left_out(self) -> list[str]:
        """The image, or what is asked of it beside its URL: the model's own processor decides."""
        if self._images is None:
            return super().left_out
        beside = self.image_url if isinstance(self.image_url, dict) else {"detail": self.detail}
        found = [name for name in beside if name != "url" and beside[name] not in (None, "auto")]
        return [shown(f"image_url.{name}") for name in found[:MOST]]

    def see(self, images: Pictures) -> None:
        """Have the image join those of the prompt, as soon as the prompt's text is made."""
        self._images = images


Part = Annotated[TextPart | RefusalPart | ThinkingPart | MessagePart | ImagePart | Unusable, ByType()]


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class Message(Body):
    """A message."""

    IGNORED = ANSWERED | {"audio", "name", "refusal"}
    ALIASES: ClassVar[Mapping[str, str]] = {"reasoning": "reasoning_content", "reasoning_text": "reasoning_content"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: OneOr[Text, Annotated[list[Part], Field(max_length=MAX_MESSAGES)]] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Annotated[Text | None, BeforeValidator(_text_or_none)] = None
    _left_out: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _with_tools(cls, given: Any) -> Any:
        """OpenAI's older form, in which a message has one `function_call`, and its result the role `function`."""
        if given.__class__ is not dict or not ("function_call" in given or "role" in given):
            return given
        if "function_call" not in given and given["role"] != "function":
            return given
        call, given = given.get("function_call"), {name: given[name] for name in given if name != "function_call"}
        role = {"role": "tool"} if given.get("role") == "function" else {}
        calls = {"tool_calls": [{"function": call}]} if call is not None and not given.get("tool_calls") else {}
        return given | role | calls

    @property
    def left_out(self) -> list[str]:
        """What the prompt lacks of the message."""
        parts = self.content if isinstance(self.content, list) else []
        found = [*self._left_out]
        for part in parts:
            if isinstance(part, Unusable):
                found += part.left_out
        return found

    @property
    def images(self) -> list[ImagePart]:
        return [part for part in self.content if isinstance(part, ImagePart)] if isinstance(self.content, list) else []

    @model_validator(mode="after")
    def _without_billing(self) -> Message:
        texts = self.content if isinstance(self.content, list) else []
        first = next((part for part in texts if isinstance(part, TextPart)), None)
        text = self.content if isinstance(self.content, str) else "" if first is None else first.text
        if self.role in ("system", "developer") and (found := _BILLING.match(text)):
            self._left_out = ["x-anthropic-billing-header"]
            rest = text[found.end() :]
            if first is None:
                self.content = rest
            elif rest or len(texts) == 1:
                self.content = [part.model_copy(update={"text": rest}) if part is first else part for part in texts]
            else:
                self.content = [part for part in texts if part is not first]
        return self

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of role {self.role} needs content")
        for part in self.parts:
            part.check(self.role)
        return self

    def plain(self, mark: Mark = unmarked) -> dict[str, Any]:
        """The message as a dict for the chat template: role, content, reasoning, tool calls, id of the answered call.

        The content is a string, or a list of strings and `GivenPart`s if it has one of these. The text that `mark`
        returns is written behind each text and each call.
        """
        content: Any = self.content or ""
        thoughts = [self.reasoning_content] if self.reasoning_content else []
        if isinstance(content, list):
            thoughts += [part.thinking for part in content if isinstance(part, ThinkingPart)]
            shown = [self._shown(part, mark) for part in content if not isinstance(part, ThinkingPart)]
            content = [part for part in shown if part is not None]
            content = joined(content) if all(isinstance(part, str) for part in content) else content
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if thoughts:
            turn["reasoning_content"] = turn["thinking"] = "\n".join(thoughts)  # templates read one or the other
        if self.tool_calls:
            turn["tool_calls"] = [one for call in self.tool_calls for one in call.plain(mark)]
        return turn | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})

    @staticmethod
    def _shown(part: Any, mark: Mark) -> str | GivenPart | None:
        if isinstance(part, FeaturePart):
            return part.given
        return part.text + (mark(part.prompt_cache_breakpoint) if isinstance(part, TextPart | ImagePart) else "")

    @property
    def parts(self) -> list[FeaturePart]:
        """What features put into the prompt."""
        return [one for one in self.content if isinstance(one, FeaturePart)] if isinstance(self.content, list) else []

    @property
    def num_characters(self) -> int:
        """The number of characters in the content, without what is stored."""
        thoughts = len(self.reasoning_content or "")
        if not isinstance(self.content, list):
            return thoughts + len(self.content or "")
        thoughts += sum(len(part.thinking) for part in self.content if isinstance(part, ThinkingPart))
        texts = sum(len(part.text) for part in self.content if isinstance(part, TextPart | RefusalPart))
        return thoughts + texts + sum(part.given.num_characters for part in self.parts if part.given)


def _check_calls(messages: list[Message]) -> list[Message]:
    calls = [call for message in messages for call in message.tool_calls or ()]
    try:
        check_texts(call.function.arguments for call in calls)
    except ValueError as error:
        raise ValueError(f"the arguments of tool calls have {error}") from None
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_check_calls)]
