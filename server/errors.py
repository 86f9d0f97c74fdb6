"""The error schema of all routes: `{"error": {"message", "type", "param", "code"}}`.

Anthropic's routes use their own types, and wrap the error in an object with `type` and `request_id`.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel
from starlette.exceptions import HTTPException

from runtime.errors import InvalidRequest, RametError, TooLong
from runtime.logs import request_id

RETRY_AFTER_S = 1

# OpenAI's clients retry these unless they are told not to, although the same request fails again.
_NOT_AGAIN = frozenset((408, 409))

_NO_OBJECT = ("missing", "model_attributes_type", "model_type")
_MAX_NAME = 100
# Messages quote requests, which may be megabytes long.
_MAX_MESSAGE = 500
# The path prefix of Anthropic's routes, and their error types by status.
_MESSAGES = "/v1/messages"
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_DETAILED = ("thread_not_found",)
# llama.cpp's own route, whose clients know a prompt that is too long by its type and numbers.
_INFILL = "/infill"
_BRANCHES = frozenset(("str", "int", "float", "bool", "list", "dict"))


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."


class ErrorDetail(BaseModel):
    message: Annotated[str, AfterValidator(_clip)]
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class MessageError(BaseModel):
    """The body of every error response of Anthropic's routes."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


class BadKeys(RametError):
    """The configured keys cannot be read, or their secret not kept. The message never contains a key."""


class Unauthorized(RametError):
    """The key is missing or unknown (HTTP 401)."""

    status = 401
    type = "authentication_error"


class Forbidden(RametError):
    """The key lacks the permission (HTTP 403)."""

    status = 403
    type = "permission_error"


class NotFound(RametError):
    """A named object does not exist (HTTP 404)."""

    status = 404
    type = "not_found_error"


class Conflict(RametError):
    """The name is taken, a bound is reached, or the object was deleted during the request (HTTP 409)."""

    status = 409
    type = "conflict_error"


class BodyTooLarge(RametError):
    """The body is too large (HTTP 413)."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(RametError):
    """The body is not JSON, or is compressed (HTTP 415)."""

    status = 415
    type = "invalid_request_error"


class ClientGone(RametError):
    """The client disconnected before its answer was ready. Nobody gets this error; it is only logged (HTTP 499)."""

    status = 499


class NotImplementedHere(RametError):
    """Ramet does not implement this route of another API (HTTP 501)."""

    status = 501
    type = "not_implemented_error"


def error_body(error: RametError) -> dict[str, Any]:
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return {"error": detail.model_dump()}


def message_error(error: RametError, status: int | None = None) -> dict[str, Any]:
    """The error in the form of Anthropic's routes."""
    body = error_body(error)
    if isinstance(error, TooLong):  # clients read the numbers in Anthropic's own words
        total, limit = f"{error.prompt} + {error.new}", error.limit
        body["error"]["message"] = (
            f"prompt is too long: {error.prompt} tokens > {limit} maximum"
            if error.prompt >= limit
            else f"input length and `max_tokens` exceed context limit: {total} > {limit}, decrease input length or "
            "`max_tokens` and try again"
        )
    body["error"]["type"] = _MESSAGE_TYPES.get(status or error.status, "invalid_request_error")
    if error.code in _DETAILED:  # by these details, clients know what to send instead
        body["error"]["details"] = {"error_code": error.code}
    return {"type": "error", **body, "request_id": request_id.get()}


def infill_error(error: RametError) -> dict[str, Any]:
    """The error in llama.cpp's form."""
    body = error_body(error)
    if isinstance(error, TooLong) and error.prompt >= error.limit:
        words = f"request ({error.prompt} tokens) exceeds the available context size ({error.limit} tokens)"
        body["error"] |= {"message": f"{words}, try increasing it", "type": "exceed_context_size_error"}
        body["error"] |= {"code": error.status, "n_prompt_tokens": error.prompt, "n_ctx": error.limit}
    return body


def error_response(error: RametError, path: str = "", status: int | None = None) -> JSONResponse:
    """The HTTP response to a request for `path` that failed. Sets Retry-After and X-Should-Retry if they apply."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    if error.status in _NOT_AGAIN:
        headers["X-Should-Retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if path.startswith(_MESSAGES):
        body = message_error(error, status)
    else:
        body = infill_error(error) if path == _INFILL else error_body(error)
    return JSONResponse(body, status_code=status or error.status, headers=headers)


def install(app: FastAPI, paths: Sequence[str]) -> None:
    """Register handlers that answer errors in the one schema. `AccessLog` answers unexpected exceptions."""

    @app.exception_handler(RametError)
    async def _ramet(request: Request, error: RametError) -> JSONResponse:
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _first_problem(error)
        return error_response(InvalidRequest(message, param=param), request.url.path)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        meant = get_close_matches(request.url.path, paths, 1, cutoff=0.8)
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        messages = {
            400: "the body is not valid JSON in UTF-8",
            404: f"there is no route {request.url.path}" + (f"; did you mean {meant[0]}?" if meant else ""),
            405: f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}",
        }
        own = InvalidRequest(messages.get(error.status_code, str(error.detail)))
        response = error_response(own, request.url.path, error.status_code)
        response.headers.update(error.headers or {})
        return response


def _first_problem(error: RequestValidationError) -> tuple[str, str | None]:
    """The message, and the path of the field at fault.

    A value that fits no branch of a union has an error for each branch. The error with the longest path is reported.
    """
    problem = max(error.errors(), key=lambda problem: len(problem["loc"]))
    if problem["type"] == "json_invalid":
        return (
            f"the body is not valid JSON in UTF-8: {problem.get('ctx', {}).get('error', 'it cannot be parsed')}",
            None,
        )
    if problem["loc"] == ("body",) and problem["type"] in _NO_OBJECT:
        return "the body must be a JSON object", None
    *path, last = problem["loc"][1:] or ("",)
    names = [str(part) for part in path if _names_a_field(part)]
    meant = problem.get("ctx", {}).get("meant")  # set for an unknown field, whose name is not in the location
    if (problem["type"] == "extra_forbidden" and meant is None) or _names_a_field(last):
        names.append(str(last)[:_MAX_NAME])
    if meant is not None:
        names.append(str(problem["ctx"]["field"])[:_MAX_NAME])
    # A field name may contain a lone surrogate, which cannot be encoded.
    param = ".".join(names).encode(errors="replace").decode() or None
    if problem["type"] == "extra_forbidden":
        return f"unknown field {param}{'' if meant is None else f'; did you mean {meant}?'}", param
    message = problem["msg"].removeprefix("Value error, ")
    return (f"{param}: {message}" if param else message), param


def _names_a_field(part: str | int) -> bool:
    """Whether an element of an error's location is an index or a field, and not the tag of a union's branch."""
    return isinstance(part, int) or (part.isidentifier() and part.islower() and part not in _BRANCHES)
