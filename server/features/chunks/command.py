"""What documents and modules add to the command line: options of `ramet generate`, and `ramet schema`.

The command imports this module for all its commands, so what a command needs is imported in its functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from server.options import add_options, config_from, read_file

if TYPE_CHECKING:
    from runtime.frontend.output import Prompt
    from runtime.offline import Engine


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which `ramet generate` makes a prompt of a schema or of documents."""
    from runtime.features.chunks.ask import Mode

    parser.add_argument("--schema", metavar="FILE", help="a schema in PML; the prompt is PML too: <prompt schema=...>")
    parser.add_argument("--mode", choices=get_args(Mode), help="mode of the schema; default: independent")
    parser.add_argument(
        "--document", metavar="FILE", action="append", help="a document before the prompt; repeatable; see --reuse"
    )


def read_prompt_options(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> Callable[[Engine, str], Prompt] | None:
    """A function that makes the prompt of the command's text; None without these options. Exits for bad options."""
    from runtime.features.chunks.documents.prompt import Document, in_messages

    if arguments.schema and (arguments.chat or arguments.document):
        parser.error("argument --schema: not with --chat or --document")
    if arguments.mode and not arguments.schema:
        parser.error("argument --mode: needs --schema")
    if arguments.schema:
        schema = read_file(parser, arguments.schema)
        return lambda engine, text: engine.schema(schema, arguments.mode or "independent").compile(text)
    if not arguments.document:
        return None
    documents = [Document(read_file(parser, name)) for name in arguments.document]

    def make(engine: Engine, text: str) -> Prompt:
        template = engine.tokenizer.apply_chat_template if arguments.chat else lambda turns: turns[0]["content"]
        return in_messages([{"role": "user", "content": [*documents, text]}], template)

    return make


def add_schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="check: print the layout, or the first error")
    parser.add_argument("file", help="a schema in PML")
    add_options(parser, "model")


def check_schema(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print the layout of a schema for a model. Raises PmlError and ModelError."""
    from runtime.features.chunks.schemas.schema import Schema
    from runtime.models.implementation import context_of
    from runtime.models.resolve import resolve_model
    from runtime.models.tokenizer import Tokenizer
    from server.features.chunks.layout_table import print_layout

    config, text = config_from(parser, arguments), read_file(parser, arguments.file)
    path = resolve_model(config.model)
    tokenizer = Tokenizer.load(path, config.model.chat_template)
    length = config.model.context_length or context_of(config.model, path)
    print_layout(Schema.read(text, tokenizer, length), config.model.model)
    return 0


COMMANDS = {"schema": ("check a schema of prompt modules, and print its layout", add_schema, check_schema)}
