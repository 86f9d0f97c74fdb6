"""`ramet explain A.json B.json`: compares the rendered prompts of two requests."""

from array import array
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radix.node import TOKEN_BYTES
from runtime.errors import InvalidRequest
from runtime.frontend.output import prompts_of
from runtime.json_text import parse_json
from runtime.logs import one_line
from runtime.models.tokenizer import Tokenizer
from server.explain.compare import Parting, compare
from server.explain.conversation import Conversation
from server.objects.documents import DocumentStore
from server.objects.segments import find_documents
from server.openai.prompt import conversation_of
from server.openai.types import ChatRequest, CompletionRequest
from server.sglang.generate import GenerateRequest

# The request fields that shape a prompt.
_SHAPING = ("messages", "tools", "tool_choice", "documents", "add_generation_prompt", "prompt", "text", "input_ids")


def explain_files(texts: tuple[str, str], names: tuple[str, str], tokenizer: Tokenizer) -> None:
    """Print where the second prompt begins to differ from the first one, and the text on both sides.

    Raises InvalidRequest if a text is no request.
    """
    bodies = [_read_json(text, name) for text, name in zip(texts, names, strict=True)]
    (first, _), (second, conversation) = (
        _render(body, name, tokenizer) for body, name in zip(bodies, names, strict=True)
    )
    parting = compare(tokenizer, second, first, conversation)
    lengths = [len(tokens) // TOKEN_BYTES for tokens in (first, second)]
    console = Console()
    table = Table(title=_title(parting, lengths), show_lines=True)
    table.add_column("")
    for name, length in zip(names, lengths, strict=True):
        table.add_column(f"{name} ({length:,} tokens)", overflow="fold", ratio=1)
    table.add_row("both", *2 * [Text(one_line(parting.before))])
    if parting.here or parting.there:
        sides = (parting.there or "", "bold red"), (parting.here, "bold green")
        table.add_row("then", *(Text(one_line(text), style) for text, style in sides))
    console.print(table)
    if len({(body.get("cache_salt"), body.get("cache_scope", "private")) for body in bodies}) > 1:
        console.print("These requests never share cached pages: their cache_salt or cache_scope differ.")


def _read_json(text: str, name: str) -> dict[str, Any]:
    try:
        body = parse_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is no request: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"{name} is no request: not a JSON object")
    return body


def _render(body: dict[str, Any], name: str, tokenizer: Tokenizer) -> tuple[bytes, Conversation | None]:
    """The first prompt of a request to /v1/chat/completions, /v1/completions or /generate.

    Returns the prompt's int32 tokens, and its conversation, None for plain text. Raises InvalidRequest.
    """
    kind = ChatRequest if "messages" in body else CompletionRequest if "prompt" in body else GenerateRequest
    shaping = {field: body[field] for field in _SHAPING if field in body}
    try:
        asked = kind.model_validate(shaping | ({"model": ""} if "model" in kind.KNOWN else {}))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise InvalidRequest(f"{name} is no request: {place}: {problem['msg']}") from None
    if isinstance(asked, ChatRequest):
        turns = find_documents(asked.turns(), "", DocumentStore())
        conversation = conversation_of(asked, turns, tokenizer)
        ids = tokenizer.encode(conversation.render(conversation.turns, conversation.tools), add_special_tokens=False)
        return array("i", ids).tobytes(), conversation
    given = asked.prompt if isinstance(asked, CompletionRequest) else asked.text or asked.input_ids
    if not given:
        raise InvalidRequest(f"{name} has neither messages nor a prompt, text or input_ids")
    first: Any = prompts_of(given)[0][0]
    ids = tokenizer.encode(first) if isinstance(first, str) else first
    if (highest := max(ids)) >= tokenizer.vocab_size:
        raise InvalidRequest(f"{name}: token id {highest} is out of range: there are {tokenizer.vocab_size} tokens")
    return array("i", ids).tobytes(), None


def _title(parting: Parting, lengths: list[int]) -> str:
    if parting.token == lengths[0] == lengths[1]:
        return "Both prompts are the same"
    if parting.token in lengths:
        shorter = "first" if parting.token == lengths[0] else "second"
        return f"The {shorter} prompt begins the other one"
    place = f"token {parting.token:,}, behind {parting.offset:,} characters of {parting.part}"
    return f"They part at {place}; {lengths[1] - parting.token:,} of {lengths[1]:,} tokens are not reused"
