"""Renders messages of a schema and of a prompt with the model's chat template.

The template is rendered with random marks as contents, and its text is cut at these marks.
"""

from collections.abc import Sequence
from typing import Any

from runtime.errors import InvalidRequest
from runtime.features.chunks.schemas.markup import PmlError
from runtime.models.marks import cut, new_mark
from runtime.models.tokenizer import Tokenizer

_ANSWER = {"role": "assistant", "content": "Yes."}
_QUESTION = {"role": "user", "content": "Is it so?"}


def template_pieces(tokenizer: Tokenizer, roles: Sequence[str]) -> list[str]:
    """The template's text before, between and after the messages of a schema.

    Raises:
        PmlError: if the model has no template, or its template changes these messages when others follow.
    """
    pieces = _render(tokenizer, roles, [], False)
    # Many templates require that messages of user and assistant alternate.
    if roles[-1] == "user":
        ways = [(True, []), (False, [_ANSWER, _QUESTION])]
    else:
        ways = [(True, [_QUESTION]), (False, [_QUESTION, _ANSWER, _QUESTION])]
    for generate, messages in ways:
        longer = _render(tokenizer, roles, messages, generate)
        if longer[:-1] != pieces[:-1] or not longer[-1].startswith(pieces[-1]):
            raise PmlError("this model's chat template writes these messages differently when others follow", "/")
    return pieces


def continue_chat(
    tokenizer: Tokenizer, roles: Sequence[str], end: str, messages: list[dict[str, Any]], generate: bool
) -> str:
    """The template's text of messages that follow the messages of a schema.

    Args:
        roles: roles of the schema's messages.
        end: the last piece of the schema's `template_pieces`.
        messages: the messages that follow.
        generate: whether the assistant's turn begins at the end.

    Raises:
        PmlError: if the template refuses these messages, or changes the schema's messages before them.
    """
    last = _render(tokenizer, roles, messages, generate)[-1]
    if not last.startswith(end):
        raise PmlError("this model's chat template writes the schema's messages differently before these", "/")
    return last[len(end) :]


def _render(tokenizer: Tokenizer, roles: Sequence[str], messages: list[dict[str, Any]], generate: bool) -> list[str]:
    """The text around the contents of `roles`, len(roles) + 1 pieces; the last piece includes `messages`."""
    marks = [new_mark() for _ in roles]
    known = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        text = tokenizer.apply_chat_template([*known, *messages], generate)
    except InvalidRequest as error:
        raise PmlError(error.message, "/") from None
    pieces = cut(text, marks)
    if pieces is None:
        raise PmlError("this model's chat template leaves out messages, or writes them twice or in another order", "/")
    return pieces
