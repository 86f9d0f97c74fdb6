"""Where chat templates run: they come with models, and what they are given comes from anybody."""

from __future__ import annotations

import threading
import time
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# How long a chat template may run: thousands of messages take milliseconds.
TEMPLATE_S = 5.0
_MAX_POWER = 64

_deadline = threading.local()


def start_clock() -> None:
    """What this thread renders next has TEMPLATE_S seconds."""
    _deadline.at_s = time.monotonic() + TEMPLATE_S


class TemplateTimeout(Exception):
    """A chat template has run for too long."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates that reach nothing of this process and end in time.

    A thread cannot be ended from outside, so whatever a template looks up or calls looks at the clock first.
    """

    def _check(self) -> None:
        if time.monotonic() > getattr(_deadline, "at_s", float("inf")):
            raise TemplateTimeout

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See jinja2's SandboxedEnvironment."""
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See jinja2's SandboxedEnvironment."""
        self._check()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """See jinja2's SandboxedEnvironment."""
        self._check()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See jinja2's SandboxedEnvironment."""
        self._check()
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TemplateError("only numbers can be multiplied")  # a string times a number fills any memory
        if operator == "**" and abs(right) > _MAX_POWER:
            raise TemplateError("the exponent is too large")
        return super().call_binop(context, operator, left, right)

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "/", "//"])
