"""The `ramet` command."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from runtime.errors import RametError
from runtime.frontend.output import Prompt
from server.features import command_line
from server.options import add_options, config_from, options_page, read_file

if TYPE_CHECKING:
    from runtime.params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ramet` and return the exit code."""
    parser = _Parser("ramet", description="Serve language models from a radix tree of shared prefixes.")
    parser.add_argument("--version", action="version", version=f"ramet {version('ramet')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if argv is None else argv
    if given and not given[0].startswith("-") and given[0] not in _COMMANDS:
        meant = get_close_matches(given[0], _COMMANDS, 1)
        parser.error(f"there is no command {given[0]!r}{f'; did you mean {meant[0]}?' if meant else ''}")
    for name, (text, add, _) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in given[:1]:  # options of other commands are not added, because some import torch
            add(command)
    arguments, unknown = parser.parse_known_args(given)
    chosen = commands.choices[arguments.command]
    if unknown:
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(chosen, unknown)}")
    run = _COMMANDS[arguments.command][2]
    try:
        code = run(chosen, arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader closed the pipe, so flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except RametError as error:
        print(f"ramet: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"ramet: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors without the usage, because the usage of `serve` fills a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _meant(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    """A hint with the known options closest to the unknown ones; empty if none is close."""
    known: list[str] = []
    found: list[str] = []
    parsers = [parser]
    for one in parsers:
        known += one._option_string_actions
        nested = [action.choices for action in one._actions if isinstance(action, argparse._SubParsersAction)]
        parsers += [inner for choices in nested for inner in choices.values()]
    for text in unknown:
        name = text.partition("=")[0]
        found += get_close_matches(name, known, 1) if name.startswith("--") else []
    return f"; did you mean {' and '.join(found)}?" if found else ""


def _serve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from server.serve import serve

    return serve(config_from(parser, arguments))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    command_line.add_prompt_options(parser)
    parser.add_argument("--adapter", metavar="NAME", help="an adapter loaded by --lora")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the prompt as a user's message")
    _add_sampling(parser, 128, 0.0)


def _add_sampling(parser: argparse.ArgumentParser, tokens: int, temperature: float) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=tokens, help=f"default: {tokens}")
    parser.add_argument("--temperature", type=float, default=temperature, help=f"default: {temperature:g}; 0: greedy")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    add_options(parser, "model", unlisted=("cache", "scheduler", "engine"))


def _sampling(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> "SamplingParams":
    from runtime.params import SamplingParams

    try:
        return SamplingParams(
            max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=arguments.seed
        )
    except ValidationError as error:
        problem = error.errors()[0]
        parser.error(f"argument --{str(problem['loc'][0]).replace('_', '-')}: {problem['msg']}")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    _add_sampling(parser, 1024, 0.7)


def _chat(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from runtime import Engine
    from runtime.config import default_cache_dir
    from server.commands.chat import chat

    config, sampling = config_from(parser, arguments), _sampling(parser, arguments)
    with Engine(config=config) as engine:
        chat(engine, sampling, arguments.system, default_cache_dir() / "chat-history")
    return 0


def _generate(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from runtime import Engine, Submission
    from server.commands.chat import harmless

    config = config_from(parser, arguments)
    make = command_line.read_prompt_options(parser, arguments)
    given = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    sampling = _sampling(parser, arguments)
    prompt: Prompt = given
    with Engine(config=config) as engine:
        if make is not None:
            prompt = make(engine, given)
        elif arguments.chat:
            prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": given}])
        adapted = engine.namespace(arguments.adapter)
        submission = Submission(prompt, sampling, namespace=adapted, add_special_tokens=not arguments.chat)
        for output in engine.stream_all([submission]):
            print(harmless(output.delta) if sys.stdout.isatty() else output.delta, end="", flush=True)
    print()
    return 0


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs=2, help="a request's JSON: /v1/chat/completions, /v1/completions or /generate")
    add_options(parser, "model")


def _explain(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from runtime.models.resolve import resolve_model
    from runtime.models.tokenizer import Tokenizer
    from server.commands.explain import explain_files

    config = config_from(parser, arguments)
    first, second = arguments.file
    texts = read_file(parser, first), read_file(parser, second)
    tokenizer = Tokenizer.load(resolve_model(config.model), config.model.chat_template)
    explain_files(texts, (first, second), tokenizer)
    return 0


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", help="JSON lines: answers to requests with `receipt` and `return_token_ids`, or a trace"
    )
    add_options(parser, "model", unlisted=("cache", "scheduler", "engine", "tiers"))


def _verify(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from loadgen.offline.verify import verify

    config, text = config_from(parser, arguments), read_file(parser, arguments.file)
    return verify(text, config)


def _fetch(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from runtime.models.implementation import own_spec
    from runtime.models.resolve import resolve_model

    config = config_from(parser, arguments).model
    path = resolve_model(config)
    own_spec(config, path)  # raises an error if the directory has no model that can be served
    print(path)
    return 0


def _doctor(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from server.doctor import print_report

    print_report(config_from(parser, arguments))
    return 0


def _options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    print(options_page())
    return 0


def _add_cache(parser: argparse.ArgumentParser) -> None:
    from server.tiers.command import add_arguments

    add_arguments(parser)


def _cache(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from server.tiers.command import run

    return run(arguments)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    if missing := [name for name in _BENCH_PACKAGES if find_spec(name) is None]:
        parser.exit(
            1,
            f"ramet: benchmarks need {', '.join(missing)}: `make extra-bench`, or `pip install {' '.join(missing)}`\n",
        )
    from loadgen.commands import add_benches

    add_benches(parser)


def _bench(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from loadgen.commands import run_bench

    return run_bench(arguments)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    from loadgen.offline.profile.command import add_arguments

    add_arguments(parser)
    add_options(parser, "model")


def _profile(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from loadgen.offline.profile.command import profile, settings_of

    config = config_from(parser, arguments)
    try:
        files, settings = settings_of(arguments)
    except ValueError as error:
        parser.error(f"argument {error}")
    return profile(config, files, settings)


Command = tuple[
    str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.ArgumentParser, argparse.Namespace], int]
]
_COMMANDS: dict[str, Command] = {
    "serve": ("serve a model over HTTP", add_options, _serve),
    "generate": ("generate from a prompt on the terminal, without a server", _add_generate, _generate),
    "chat": ("talk to a model on the terminal, without a server", _add_chat, _chat),
    **command_line.COMMANDS,
    "explain": ("show where the prompts of two requests begin to differ", _add_explain, _explain),
    "verify": ("compute recorded answers again, and show which conditions change them", _add_verify, _verify),
    "fetch-model": ("fetch and convert a model, and print its directory", lambda p: add_options(p, "model"), _fetch),
    "profile": ("measure how a model's KV can be reused, and write a table for the engine", _add_profile, _profile),
    "cache": ("list or delete the blocks of a disk cache", _add_cache, _cache),
    "bench": ("measure a server or this machine", _add_bench, _bench),
    "doctor": (
        "print this machine's hardware and packages, and what would make Ramet faster",
        lambda p: add_options(p, "model", unlisted=("cache",)),
        _doctor,
    ),
    "options": ("print the options of `serve` as tables in Markdown", lambda parser: None, _options),
}
# Packages of the extra `load`. Only plots need matplotlib.
_BENCH_PACKAGES = ("aiohttp", "httpx")

if __name__ == "__main__":
    sys.exit(main())
