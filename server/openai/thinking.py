"""Fields by which other servers' clients ask for reasoning and usage, in Ramet's own fields."""

from typing import Any

from server.http import unknown_fields


def in_own_fields(given: dict[str, Any]) -> dict[str, Any]:
    """A chat with `thinking`, `think`, OpenRouter's `reasoning` and `usage` in fields of `ChatRequest`.

    A field of the chat itself counts more. Values of other forms stay, and are left out like unknown fields.
    """
    wanted: dict[str, Any] = {}
    rest = dict(given)
    match given.get("thinking"):
        case {"type": str(kind), **others}:
            wanted["enable_thinking"] = kind != "disabled"
            del rest["thinking"]
            _note("thinking", others)
    match given.get("think"):
        case bool(on):
            wanted["enable_thinking"] = on
            del rest["think"]
        case str(effort):
            wanted["reasoning_effort"] = effort
            del rest["think"]
    match given.get("reasoning"):
        case dict(options):
            wanted |= _reasoning(options)
            del rest["reasoning"]
    match given.get("usage"):
        case {"include": bool(on), **others} if not others:
            if on and given.get("stream") is True:
                wanted["stream_options"] = {"include_usage": True}
            del rest["usage"]
    return rest | {name: value for name, value in wanted.items() if rest.get(name) is None}


def _reasoning(options: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    others = dict(options)
    if isinstance(options.get("effort"), str):
        own["reasoning_effort"] = others.pop("effort")
    if isinstance(options.get("enabled"), bool):
        own["enable_thinking"] = others.pop("enabled")
    if isinstance(options.get("exclude"), bool):
        own["include_reasoning"] = not others.pop("exclude")
    _note("reasoning", others)
    return own


def _note(field: str, options: dict[Any, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            unknown_fields.leave_out(f"{field}.{name}")
