"""What a feature does to submissions in the server's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.config import Config
from runtime.frontend.lengths import Lengths
from runtime.frontend.output import Encoded, Prompt, Submission
from runtime.frontend.pictures import Sight
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import ModelInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model whose engine is ready. `path`: the model's directory."""

    config: Config
    path: Path
    tokenizer: Tokenizer
    info: ModelInfo


class Preparer:
    """A feature's share of an `InputProcessor`, which calls all but `settle` in several threads.

    A feature has the hooks it needs.

    Attributes:
        sight: how the model sees images, if by this feature.
        granule: number of output positions that are generated as a whole.
    """

    sight: Sight | None = None
    granule = 1

    def why_exact(self, submission: Submission) -> str | None:
        """Why a submission must be computed without approximate reuse, as the end of a sentence; None: no reason."""
        return None

    def place(self, submission: Submission, prompt: Prompt, exact: str | None) -> Prompt:
        """The submission's prompt with its parts in place. `exact`: see `why_exact`. Raises InvalidRequest."""
        return prompt

    def fill(self, submission: Encoded, tokens: list[int], lengths: Lengths) -> Encoded:
        """A submission of whose decoding all is known. Raises InvalidRequest if it can never be served.

        Args:
            submission: all but its `decoding` and `ask` is known.
            tokens: the prompt's own tokens.
            lengths: for checks.
        """
        return submission

    async def settle(self, submission: Encoded) -> Encoded:
        """A submission whose checks that take long are done. Raises InvalidRequest if it can never be served."""
        return submission

    def erase(self, account: str) -> None:
        """Forget what is kept of an account."""
        if self.sight is not None:
            self.sight.erase(account)

    def close(self) -> None:
        """End threads and processes."""


OpenPreparers = Callable[[ServedModel], list[Preparer]]


def no_preparers(served: ServedModel) -> list[Preparer]:
    """The `OpenPreparers` of a front end for texts and tokens alone."""
    return []
