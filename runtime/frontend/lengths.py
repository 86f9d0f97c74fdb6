"""How long prompts and outputs may be."""

from runtime.config import SchedulerConfig
from runtime.errors import InvalidRequest, TooLong
from runtime.protocol import ModelInfo


class Lengths:
    """The limits of a model, its pool and its server on one request.

    Args:
        info: the loaded model.
        config: the server's limit.
        granule: number of output positions that are generated as a whole.
    """

    def __init__(self, info: ModelInfo, config: SchedulerConfig, granule: int):
        self._info, self._config, self._granule = info, config, granule

    def left(self, prompt: int, positions: int) -> int:
        """Most new tokens behind a prompt of so many tokens and positions, at least 1."""
        room = min(self._info.context_length - positions, self._info.pool_tokens - prompt)
        return max(min(room // self._granule * self._granule, self._config.max_output_tokens or room), 1)

    def most_prompt(self, new: int | None) -> int:
        """Most tokens of a prompt before `new` tokens, None: before one; at least 1."""
        room = min(self._info.context_length, self._info.pool_tokens)
        return max(room - self._whole(1 if new is None else new), 1)

    def most_output(self, prompt: int, positions: int) -> int | None:
        """Output limit of a request that sets none, in tokens; None: as many as the context holds."""
        info = self._info
        if self._config.max_output_tokens is None:
            return None
        return min(self._config.max_output_tokens, info.context_length - positions, info.pool_tokens - prompt)

    def check(self, prompt: int, new: int | None, positions: int) -> None:
        """Raise InvalidRequest if `new` tokens, None: one, do not fit behind a prompt of so many tokens and positions.

        It is a `TooLong` if the context or the pool is too small.
        """
        if self._config.max_output_tokens is not None and (new or 0) > self._config.max_output_tokens:
            message = f"{new} new tokens are requested; this server allows {self._config.max_output_tokens}"
            raise InvalidRequest(message, param="max_new_tokens")
        wanted = 1 if new is None else self._whole(new)
        for used, limit, what in (
            (positions, self._info.context_length, "this model's maximum context length"),
            (prompt, self._info.pool_tokens, "the size of the KV pool"),
        ):
            if used + wanted > limit:
                raise TooLong(used, wanted, limit, what=what, param="prompt" if used >= limit else "max_new_tokens")

    def _whole(self, new: int) -> int:
        """Number of positions for `new` tokens, rounded up to whole granules."""
        return -(-new // self._granule) * self._granule
