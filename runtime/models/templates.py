"""Chat templates, rendered in processes that can be killed: nothing else bounds their time and memory."""

import atexit
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.errors import InvalidRequest
from runtime.models import template_program as program
from runtime.models.process_pool import ProcessPool
from runtime.models.template_program import TEMPLATE_S


class TemplateRefused(InvalidRequest):
    """The chat template raises an error for these messages."""


class TemplateProcesses(ProcessPool):
    """A pool of processes, each of which renders one template at a time."""

    def __init__(self) -> None:
        super().__init__("render the chat template", [program.__file__], program.read_frame)

    def render(self, template: str, values: Mapping[str, Any] | None) -> str:
        """The text of a template with its variables, in JSON's types; None: only read the template, and return "".

        Raises:
            InvalidRequest: if the template cannot be read, or takes too long.
            TemplateRefused: if it refuses the values, or takes too much memory.
            Overloaded: see `ask`.
        """
        try:
            request = msgspec.json.encode((template, values))
        except (UnicodeEncodeError, TypeError, ValueError) as error:
            raise TemplateRefused(f"the chat template takes no such messages: {error}", param="messages") from None
        answer = self.ask(lambda requests: program.write_frame(requests, request), TEMPLATE_S)
        if answer is None:
            raise InvalidRequest("the chat template takes too long with these messages", param="messages")
        if not answer:
            raise TemplateRefused("the chat template refuses these messages: it ended its process", param="messages")
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == program.UNREADABLE:
            raise InvalidRequest(f"the model's chat template cannot be read: {text}")
        if kind == program.REFUSED:
            raise TemplateRefused(f"the chat template refuses these messages: {text}", param="messages")
        return text


# Shared by all tokenizers of this process: templates come with each request.
PROCESSES = TemplateProcesses()
atexit.register(PROCESSES.close)
