"""Prints the layout of a schema as a table."""

from rich.console import Console
from rich.table import Table

from runtime.features.chunks.schemas.schema import Schema


def print_layout(schema: Schema, model: str) -> None:
    """Print positions, tokens, parameters and union of each module; the first row is the schema's own text."""
    modules = schema.modules()
    table = Table("path", "positions", "tokens", "parameters", "union", title=f"schema {schema.name}")
    for module in modules:
        parameters = ", ".join(
            f"{p['name']} {_span(p['start'], p['start'] + p['length'])}" for p in module["parameters"]
        )
        union = module["union"]
        shown = _span(union["start"], union["stop"]) if union else ""
        table.add_row(module["path"], _span(module["start"], module["stop"]), str(module["tokens"]), parameters, shown)
    total = sum(module["tokens"] for module in modules)
    caption = (
        f"{len(modules) - 1} modules, {total} tokens of {model}; text of prompts begins at position {schema.length}"
    )
    table.caption = caption
    Console().print(table)


def _span(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if stop > start else "none"
