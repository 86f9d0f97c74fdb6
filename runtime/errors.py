"""Errors that clients may see. Their messages say nothing about this machine."""


class RametError(Exception):
    """Base of all errors that Ramet raises on purpose.

    Attributes:
        message: one sentence for the client.
        status: the HTTP status that the server answers with.
        type: the `type` of the OpenAI error schema.
        param: the request field at fault, or None.
        code: a machine-readable reason, or None.
    """

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RametError):
    """The request is invalid and can never be served (HTTP 400)."""

    status = 400
    type = "invalid_request_error"


class TooLong(InvalidRequest):
    """A prompt and its output do not fit.

    Attributes:
        prompt, new: numbers of tokens.
        limit: the most tokens that prompt and output may have together.
    """

    def __init__(self, prompt: int, new: int, limit: int, *, what: str, param: str):
        """`what`: the limit's name."""
        words = f"{what} is {limit} tokens, but the prompt has {prompt} tokens and {new} new ones may follow"
        super().__init__(words, param=param, code="context_length_exceeded")
        self.prompt, self.new, self.limit = prompt, new, limit


class PinRefused(RametError):
    """A pin exceeds the pin budget (HTTP 409)."""

    status = 409
    type = "pin_refused"


class Overloaded(RametError):
    """The server is over its limits; the request may be retried later (HTTP 503)."""

    status = 503
    type = "overloaded_error"


class RateLimited(RametError):
    """The API key is over its limits; the request may be retried later (HTTP 429)."""

    status = 429
    type = "rate_limit_error"


class DeadlineExceeded(RametError):
    """The request exceeded its timeout (HTTP 408)."""

    status = 408
    type = "timeout_error"


class EngineDead(RametError):
    """The engine process has ended; open requests end with this error (HTTP 503)."""

    status = 503
    type = "engine_dead"


class ModelError(RametError):
    """A model cannot be loaded. The message names what was found and what is supported."""

    type = "model_error"
