"""A sandbox for chat templates, since neither the templates, which come with models, nor their input are trusted."""

import threading
import time
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Timeout of a chat template in seconds. Thousands of messages take milliseconds.
TEMPLATE_S = 5.0
_MAX_POWER = 64

_deadline = threading.local()


def start_clock() -> None:
    """Start the timeout of this thread's next template."""
    _deadline.at_s = time.monotonic() + TEMPLATE_S


class TemplateTimeout(Exception):
    """A chat template exceeded its timeout."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment with a timeout whose templates cannot access this process.

    Every lookup and call of a template checks the timeout, because a thread cannot be killed.
    """

    def _check(self) -> None:
        if time.monotonic() > getattr(_deadline, "at_s", float("inf")):
            raise TemplateTimeout

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check()
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TemplateError("only numbers can be multiplied")  # repeated strings exhaust memory
        if operator == "**" and abs(right) > _MAX_POWER:
            raise TemplateError("the exponent is too large")
        return super().call_binop(context, operator, left, right)

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "/", "//"])
