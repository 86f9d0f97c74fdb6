"""vLLM's routes of the tokenizer: texts and conversations to tokens, tokens to text, and how it is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.models.tokenizer import Tokenizer
from server.auth.keys import CurrentTenant, EveryKey
from server.http.context import Ctx
from server.http.sse import unless_gone
from server.http.wire import Body, IdPrompts, JsonObject, OneOrMany, Text, example
from server.openai.messages import Messages
from server.openai.tools import MAX_TOOLS, Tool, continue_chat, render_chat

router = EveryKey(tags=["server"])


class TokenizeRequest(Body):
    """Texts, or a conversation, to which the chat template is applied."""

    model_config = example(prompt="The capital of France is")

    model: str | None = None
    prompt: OneOrMany[Text] | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = Field(None, description="default: for texts only; a chat template has them")
    return_token_strs: bool = False

    def conversation(self, tokenizer: Tokenizer) -> str:
        """The prompt of the messages. Raises InvalidRequest."""
        turns = [message.plain() for message in self.messages or ()]
        if any(not isinstance(turn["content"], str) for turn in turns):
            raise InvalidRequest("messages with documents have no one text", param="messages")
        variables, tools = self.chat_template_kwargs or {}, self.tools or []
        if self.continue_final_message:
            return continue_chat(turns, lambda plain: render_chat(tokenizer, plain, tools, False, variables))
        return render_chat(tokenizer, turns, tools, self.add_generation_prompt, variables)


class DetokenizeRequest(Body):
    model_config = example(tokens=[504, 3575, 282, 4649, 314])
    ALIASES: ClassVar[Mapping[str, str]] = {"input_ids": "tokens"}

    model: str | None = None
    tokens: IdPrompts
    skip_special_tokens: bool = True


@router.post("/tokenize", response_model=None)
async def tokenize(request: Request, context: Ctx, body: TokenizeRequest, asker: CurrentTenant) -> Response:
    """Token ids of one text or several, or of a conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages must be given", param="prompt")
    context.check_model(body.model)
    engine = context.engine
    chat = body.messages is not None
    special = not chat if body.add_special_tokens is None else body.add_special_tokens
    single = chat or isinstance(body.prompt, str)

    async def work() -> dict[str, Any]:
        texts: list[Any] = [body.prompt] if single else body.prompt  # type: ignore[assignment]
        if body.messages is not None:
            characters = sum(message.num_characters for message in body.messages)
            texts = [await engine.in_turn(asker.account, characters, partial(body.conversation, engine.tokenizer))]
        tokens = await engine.tokenize(asker.account, texts, special)
        shown = _each(len, tokens, single)
        answer = {"tokens": tokens[0] if single else tokens, "count": shown}
        if body.return_token_strs:
            answer["token_strs"] = _each(lambda ids: [engine.tokenizer.id_to_token(i) for i in ids], tokens, single)
        return answer | {"max_model_len": engine.info.context_length}

    return await unless_gone(request, work())


def _each(show: Callable[[list[int]], Any], several: list[list[int]], single: bool) -> Any:
    return show(several[0]) if single else [show(ids) for ids in several]


@router.post("/detokenize", response_model=None)
async def detokenize(request: Request, context: Ctx, body: DetokenizeRequest, asker: CurrentTenant) -> Response:
    """Text of one list of token ids or several, as SGLang (`text`) and vLLM (`prompt`) name it."""
    context.check_model(body.model)
    single = not body.tokens or isinstance(body.tokens[0], int)
    several: list[list[int]] = [body.tokens] if single else body.tokens  # type: ignore[list-item, assignment]

    async def work() -> dict[str, Any]:
        texts = await context.engine.detokenize(asker.account, several, body.skip_special_tokens)
        text = texts[0] if single else texts
        return {"text": text, "prompt": text}

    return await unless_gone(request, work())


@router.get("/tokenizer_info")
async def tokenizer_info(context: Ctx) -> dict[str, Any]:
    """The tokenizer's configuration and chat template."""
    return context.engine.tokenizer.describe()
