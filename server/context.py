"""What every route needs: the engine, the configuration and the metrics of this server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from pydantic import Field

from runtime.client import AsyncEngine
from runtime.config import Config
from server.metrics import Metrics

CacheSalt = Annotated[
    str | None,
    Field(min_length=1, max_length=256, description="requests with different salts never share cached pages"),
]
Rid = Annotated[str, Field(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True)
class Context:
    """One server's parts."""

    engine: AsyncEngine
    config: Config
    metrics: Metrics


def get_context(request: Request) -> Context:
    """The context of the application that serves a request."""
    return request.app.state.context


Ctx = Annotated[Context, Depends(get_context)]
