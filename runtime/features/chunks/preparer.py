"""Places documents and modules in prompts, in the server's process."""

from typing import cast, get_args

from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import ChunksAsk, DocumentMethod, ReuseParams
from runtime.features.chunks.documents.plan import DocumentPlanner, DocumentPrompt, refuse_reuse
from runtime.features.chunks.documents.prompt import Segments
from runtime.features.chunks.schemas.compile import ModulePrompt
from runtime.frontend.output import Prompt, Submission
from runtime.frontend.preparer import Preparer, ServedModel

_NONE = ReuseParams(method="none")


class ChunksPreparer(Preparer):
    """Plans by the model's table and the server's default. Raises ModelError for a broken table."""

    def __init__(self, served: ServedModel):
        reuse = served.config.cache.reuse
        default = cast(DocumentMethod, reuse) if reuse in get_args(DocumentMethod) else "none"
        self._planner = DocumentPlanner.load(default, served.path)
        self._tokenizer = served.tokenizer

    def place(self, submission: Submission, prompt: Prompt, exact: str | None) -> Prompt:
        asked = submission.reuse if isinstance(submission.reuse, ReuseParams) else None
        if isinstance(prompt, Segments):
            if asked is None and exact:
                asked = _NONE  # the server's default method cannot serve this submission
            tokenized = prompt.tokenize(self._tokenizer, submission.add_special_tokens)
            prompt = self._planner.plan(tokenized, asked)
        elif isinstance(prompt, ModulePrompt):
            prompt = self._planner.repair(prompt, asked)
        elif not isinstance(prompt, DocumentPrompt):
            refuse_reuse(asked)
            return prompt
        if exact and isinstance(prompt.ask, ChunksAsk) and prompt.ask.method != "none":
            what = "documents are not reused" if prompt.ask.documents else "modules are not repaired"
            raise InvalidRequest(f"{what} {exact}", param="reuse")
        return prompt
