"""Errors that Ramet raises on purpose; each carries what a client needs to know, and nothing about this machine."""


class RametError(Exception):
    """Base of every error that Ramet raises on purpose.

    Attributes:
        message: one sentence for the client.
        status: the HTTP status that the server answers with.
        type: the error type of the OpenAI error schema.
        param: the request field at fault, if there is one.
        code: a short machine-readable reason, if there is one.
    """

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RametError):
    """The request can never be served as it is written (HTTP 400)."""

    status = 400
    type = "invalid_request_error"


class PinRefused(RametError):
    """A pin would leave live requests too little of the pool (HTTP 409)."""

    status = 409
    type = "pin_refused"


class Overloaded(RametError):
    """The request could be served later (HTTP 503)."""

    status = 503
    type = "overloaded_error"


class RateLimited(RametError):
    """This key has too much under way; the request could be served later (HTTP 429)."""

    status = 429
    type = "rate_limit_error"


class DeadlineExceeded(RametError):
    """The request took longer than it was allowed to (HTTP 408)."""

    status = 408
    type = "timeout_error"


class EngineDead(RametError):
    """The engine process has ended; open requests end with this error (HTTP 503)."""

    status = 503
    type = "engine_dead"


class ModelError(RametError):
    """A model cannot be loaded: names what was found and what is supported."""

    type = "model_error"
