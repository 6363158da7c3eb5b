"""The trace context of W3C that events and requests carry: traceparent, tracestate and baggage."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
from collections.abc import Iterator, Mapping

_NAMES = ("traceparent", "tracestate", "baggage")
_OTEL = "opentelemetry"  # used where the program has it already
_now = contextvars.ContextVar[dict[str, str]]("meander_trace", default={})  # noqa: B039 - never changed


def of(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of a trace context among those of a message, in any spelling."""
    return {k.lower(): v for k, v in (headers or {}).items() if k.lower() in _NAMES}


@contextlib.contextmanager
def traced(headers: Mapping[str, str]) -> Iterator[None]:
    """What is published inside goes on with the trace context of some headers, such as those of an HTTP request."""
    token = _now.set(of(headers))
    try:
        yield
    finally:
        _now.reset(token)


def trace_context() -> dict[str, str]:
    """The headers of the trace context that holds here: in a worker, that of the sample that it works on; else that of
    `traced`, or of a span of OpenTelemetry. `opentelemetry.propagate.extract` takes them."""
    if (held := _now.get()) or f"{_OTEL}.trace" not in sys.modules:
        return dict(held)
    carrier: dict[str, str] = {}
    importlib.import_module(f"{_OTEL}.propagate").inject(carrier)
    return of(carrier)
