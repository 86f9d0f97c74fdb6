"""vLLM's routes of the tokenizer: `/tokenize`, `/detokenize`, `/tokenizer_info`."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from runtime.errors import InvalidRequest
from server.auth.keys import CurrentTenant, EveryKey
from server.http.body import IdPrompts, JsonObject, Named, OneOrMany, Text, example
from server.http.context import Ctx
from server.http.sse import unless_gone
from server.openai.messages import Messages
from server.openai.prompt import Chats
from server.openai.tools import MAX_TOOLS, Tool
from server.openai.types import ChatRequest

router = EveryKey(tags=["server"])


class TokenizeRequest(Named):
    """Texts, or a conversation that the chat template renders."""

    model_config = example(prompt="The capital of France is")

    ALIASES: ClassVar[Mapping[str, str]] = {"content": "prompt", "add_special": "add_special_tokens"}

    model: str | None = None
    prompt: OneOrMany[Text] | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for texts, false for conversations")
    return_token_strs: bool = False

    def chat(self) -> ChatRequest:
        """The conversation as a chat."""
        names = self.model_fields_set & ChatRequest.model_fields.keys() - {"add_special_tokens"}
        return ChatRequest.model_validate({name: getattr(self, name) for name in names})


class DetokenizeRequest(Named):
    model_config = example(tokens=[504, 3575, 282, 4649, 314])
    ALIASES: ClassVar[Mapping[str, str]] = {"input_ids": "tokens"}

    model: str | None = None
    tokens: IdPrompts
    skip_special_tokens: bool = True


@router.post("/tokenize", response_model=None)
async def tokenize(
    request: Request, context: Ctx, chats: Chats, body: TokenizeRequest, asker: CurrentTenant
) -> Response:
    """Token ids of one text or several, or of a conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages must be given", param="prompt")
    context.check_model(body.model)
    engine = context.engine
    chat = None if body.messages is None else body.chat()
    special = chat is None if body.add_special_tokens is None else body.add_special_tokens
    single = chat is not None or isinstance(body.prompt, str)

    async def work() -> dict[str, Any]:
        if chat is not None:
            tokens = [await chats.tokens(chat, asker, special)]
        else:
            texts: list[Any] = [body.prompt] if single else body.prompt  # type: ignore[assignment]
            tokens = await engine.tokenize(asker.account, texts, special)
        shown = _each(len, tokens, single)
        answer = {"tokens": tokens[0] if single else tokens, "count": shown}
        if body.return_token_strs:
            answer["token_strs"] = _each(lambda ids: [engine.tokenizer.id_to_token(i) for i in ids], tokens, single)
        return answer | {"max_model_len": engine.info.context_length, **_left_out(body, chat)}

    return await unless_gone(request, work())


def _left_out(*bodies: Named | None) -> dict[str, Any]:
    found = [what for body in bodies if body is not None for what in body.left_out]
    return {"left_out": found} if found else {}


def _each(show: Callable[[list[int]], Any], several: list[list[int]], single: bool) -> Any:
    return show(several[0]) if single else [show(ids) for ids in several]


@router.post("/detokenize", response_model=None)
async def detokenize(request: Request, context: Ctx, body: DetokenizeRequest, asker: CurrentTenant) -> Response:
    """The text of one or several lists of token ids, under SGLang's name (`text`) and vLLM's (`prompt`)."""
    context.check_model(body.model)
    single = not body.tokens or isinstance(body.tokens[0], int)
    several: list[list[int]] = [body.tokens] if single else body.tokens  # type: ignore[list-item, assignment]

    async def work() -> dict[str, Any]:
        texts = await context.engine.detokenize(asker.account, several, body.skip_special_tokens)
        text = texts[0] if single else texts
        return {"text": text, "prompt": text, **_left_out(body)}

    return await unless_gone(request, work())


@router.post("/apply-template", include_in_schema=False)
async def apply_template(body: ChatRequest, chats: Chats, asker: CurrentTenant) -> dict[str, str]:
    """The prompt's text of a chat, as llama.cpp's route gives it."""
    return {"prompt": await chats.text(body, asker)}


@router.get("/tokenizer_info")
async def tokenizer_info(context: Ctx) -> dict[str, Any]:
    """The tokenizer's configuration and chat template."""
    return context.engine.tokenizer.describe()
