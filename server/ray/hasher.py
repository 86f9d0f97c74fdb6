"""Computes the block hashes of a request's prompt: the server's tokens, without its engine."""

import json
from array import array
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from radix.hashes import block_hashes
from radix.node import TOKEN_BYTES
from runtime.config import Config
from runtime.errors import RametError
from runtime.features.registry import open_preparers
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Encoded, MarkedText, Submission
from runtime.protocol import ModelInfo
from server.anthropic import prompt as messages
from server.anthropic.types import MessagesRequest
from server.auth.keys import Tenant
from server.errors import NotFound
from server.generation.bodies import GenerationBody
from server.http.context import Context
from server.http.shutdown import ShutdownFlag
from server.objects.documents import DocumentStore
from server.objects.schemas import SchemaStore
from server.openai import completions
from server.openai.prompt import ChatPrompts
from server.openai.types import ChatRequest, CompletionRequest
from server.responses import items
from server.responses.types import ResponseRequest
from server.sglang import generate
from server.sglang.generate import GenerateRequest

# The bodies of routes whose prompts are looked up in the tree. Other requests go to any replica.
BODIES: dict[str, type[GenerationBody]] = {
    "/generate": GenerateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponseRequest,
}


class _Texts(AsyncEngine):
    """The part of an engine that makes tokens: it has a model's tokenizer and limits, and computes nothing."""

    def __init__(self, config: Config, info: ModelInfo):
        super().__init__(config, open_preparers=open_preparers)
        self.info = info

    async def start(self) -> None:
        path = await self._load()
        await self._open_features(path)
        self._inputs = InputProcessor(self.info, self.tokenizer, self.config.scheduler, self._preparers)

    async def encode(self, account: str, make: Callable[[], Submission]) -> Encoded | None:
        """A submission, made and tokenized in a turn of the account.

        None for a prompt of documents or modules, which only a replica knows. Raises InvalidRequest.
        """

        def work() -> Encoded | None:
            submission = make()
            prompt = submission.prompt() if callable(submission.prompt) else submission.prompt
            if not isinstance(prompt, str | MarkedText | list):
                return None
            return self._inputs.encode(replace(submission, prompt=prompt))

        return await self._work.run(account, work)


class PromptHasher:
    """Makes the tokens of prompts as a replica's routes make them.

    Args:
        config: the replicas' configuration, for the same chat template.
        info: the replicas' model.
    """

    def __init__(self, config: Config, info: ModelInfo):
        self._engine = _Texts(config, info)
        self._context = Context(self._engine, config, [], ShutdownFlag())
        self._stores = DocumentStore(), SchemaStore()
        self._chats = ChatPrompts(self._context, *self._stores)

    async def start(self) -> None:
        """Load the tokenizer. Raises ModelError."""
        await self._engine.start()

    async def hashes(self, method: str, path: str, body: bytes, tenant: Tenant) -> bytes:
        """The uint64 hashes of the prompt's whole blocks; empty where only a replica can tell, and for what it refuses.

        Only a replica knows its documents, modules and stored responses, and refuses with the right error.
        """
        if method != "POST" or path not in BODIES:
            return b""
        try:
            encoded = await self._engine.encode(tenant.account, partial(self._submission, path, body, tenant))
        except (RametError, ValueError):
            return b""
        if encoded is None:
            return b""
        page = self._engine.info.page_size * TOKEN_BYTES
        return array("Q", block_hashes(encoded.tokens, page, None, encoded.namespace)).tobytes()

    def _submission(self, path: str, body: bytes, tenant: Tenant) -> Submission:
        """The first submission of a request. Raises RametError, and ValueError for what is no such body."""
        asked = BODIES[path].model_validate(json.loads(body))
        self._context.check_model(asked.model)
        match asked:
            case GenerateRequest():
                submissions, _ = generate.submissions_of(asked, tenant, self._context, *self._stores)
                return submissions[0]
            case CompletionRequest():
                return completions.submissions_of(asked, tenant, self._context)[0]
            case MessagesRequest() if asked.previous is None:
                asked = messages.chat_of(asked)
            case ResponseRequest() if asked.previous_response_id is None:
                asked = items.chat_of(asked, items.read_input(asked.input, {}))
        if not isinstance(asked, ChatRequest):
            raise NotFound("only a replica has the stored answer that this request continues")
        return self._chats.submission(asked, tenant)
