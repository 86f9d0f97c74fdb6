"""OpenTelemetry traces (extra `otel`): a span for every HTTP request."""

import logging
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from runtime.logs import request_id

log = logging.getLogger("ramet.server")


def add_traces(app: FastAPI) -> None:
    """Send a span for every request to the collector at $OTEL_EXPORTER_OTLP_ENDPOINT, e.g. http://127.0.0.1:4318.

    The header `traceparent` sets the span's parent. Without the extra `otel`, a warning is logged and the server goes
    on, because the variable may be meant for other programs.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no traces: $OTEL_EXPORTER_OTLP_ENDPOINT needs `make extra-otel`; %s is missing", error.name)
        return
    provider = TracerProvider(resource=Resource({"service.name": "ramet", "service.version": version("ramet")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    # No spans for `receive` and `send`, because every event of a stream would have one. The last batch is sent at exit.
    app.add_middleware(
        OpenTelemetryMiddleware,
        tracer_provider=provider,
        exclude_spans=["receive", "send"],
        server_request_hook=_name_request,
    )


def _name_request(span: Any, scope: dict[str, Any]) -> None:
    if span is not None and span.is_recording():
        span.set_attribute("ramet.request_id", request_id.get())
