"""One error schema for everything: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from runtime.errors import RametError

log = logging.getLogger("ramet.server")

RETRY_AFTER_S = 1


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class NotFound(RametError):
    """Something that was named does not exist (HTTP 404)."""

    status = 404
    type = "not_found_error"


class BodyTooLarge(RametError):
    """HTTP 413."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(RametError):
    """HTTP 415."""

    status = 415
    type = "invalid_request_error"


def error_body(error: RametError) -> dict[str, Any]:
    """The schema's dict of an error."""
    detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    return {"error": detail.model_dump()}


def error_response(error: RametError) -> JSONResponse:
    """The HTTP answer of an error; overload tells when to come back."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every kind of failure in the one schema."""

    @app.exception_handler(RametError)
    async def _ramet(_: Request, error: RametError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _first_problem(error)
        return _plain(400, message, "invalid_request_error", param)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            400: "the body is not valid JSON in UTF-8",
            404: f"there is no route {request.url.path}",
            405: f"{request.method} is not allowed on {request.url.path}",
        }
        answer = _plain(error.status_code, messages.get(error.status_code, str(error.detail)), "invalid_request_error")
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _plain(500, "an internal error occurred", "internal_error")


def _plain(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    detail = ErrorDetail(message=message, type=kind, param=param)
    return JSONResponse({"error": detail.model_dump()}, status_code=status)


def _first_problem(error: RequestValidationError) -> tuple[str, str | None]:
    """One sentence and the field of the first problem; branches of unions are left out of the field's path."""
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        return f"the body is not valid JSON: {problem.get('ctx', {}).get('error', 'it cannot be parsed')}", None
    path: list[str] = []
    for part in problem["loc"][1:]:
        if isinstance(part, str) and not part.isidentifier():
            break
        if not str(part)[0].isupper():  # else the class of a branch
            path.append(str(part))
    while path and path[-1] in ("str", "int", "float", "bool", "list", "dict"):
        path.pop()
    param = ".".join(path) or None
    if problem["type"] == "extra_forbidden":
        return f"unknown field {param}", param
    message = problem["msg"].removeprefix("Value error, ")
    return (f"{param}: {message}" if param else message), param
