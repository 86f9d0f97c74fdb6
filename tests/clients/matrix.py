"""`make clients`: other people's clients against a server, each in an environment of its own; prints a table.

`python tests/clients/matrix.py [NAME ...]` sets up one environment for each client in `.venv/clients/NAME`, starts a
server, and runs `NAME.py` or `NAME.mjs` with its URL and its model's name. A script that fails raises.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadgen.http.local_server import small_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "smollm2-135m-instruct"
PATIENCE_S = 900


@dataclass(frozen=True)
class Client:
    """A client, and its packages of PyPI or of npm; `agent`: it is a program that `agent.py` runs."""

    name: str
    packages: tuple[str, ...]
    npm: bool = False
    agent: bool = False

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}.{'mjs' if self.npm else 'py'}"


CLIENTS = (
    Client("openai_python", ("openai>=3,<4",)),
    Client("anthropic_python", ("anthropic",)),
    Client("langchain", ("langchain-openai", "langchain-anthropic")),
    Client("llamaindex", ("llama-index-llms-openai-like",)),
    Client("litellm", ("litellm", "mcp")),
    Client("litellm_proxy", ("litellm[proxy]",)),
    Client("pydantic_ai", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("instructor", ("instructor",)),
    Client("openai_agents", ("openai-agents",)),
    Client("dspy", ("dspy",)),
    Client("lm_eval", ("lm_eval[api]",)),
    Client("guidellm", ("guidellm",)),
    Client("aiperf", ("aiperf",)),
    Client("smg", ("smg", "sglang-router")),
    Client("openai_js", ("openai",), npm=True),
    Client("anthropic_js", ("@anthropic-ai/sdk",), npm=True),
    Client("ai_sdk", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"), npm=True),
    Client("claude_code", ("@anthropic-ai/claude-code",), npm=True, agent=True),
    Client("codex", ("@openai/codex",), npm=True, agent=True),
    Client("opencode", ("opencode-ai",), npm=True, agent=True),
    Client("qwen_code", ("@qwen-code/qwen-code",), npm=True, agent=True),
    Client("pi", ("@mariozechner/pi-coding-agent",), npm=True, agent=True),
    Client("cline", ("cline",), npm=True, agent=True),
    Client("aider", ("aider-chat",), agent=True),
    Client("continue_cli", ("@continuedev/cli",), npm=True, agent=True),
    Client("goose", ("@aaif/goose",), npm=True, agent=True),
)


def set_up(client: Client, home: Path) -> list[str]:
    """The command that runs the client's script, in an environment with its packages. Raises CalledProcessError."""
    stamp = home / "packages.json"
    if client.npm:
        home.mkdir(parents=True, exist_ok=True)
        script = home / client.script.name  # modules are found from where the script lies
        if not client.agent:
            shutil.copy(client.script, script)
        command, install = ["node", str(script)], ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home)]
        if not (home / "package.json").exists():  # some packages read it while they are installed
            (home / "package.json").write_text("{}")
    else:
        if not (home / "bin/python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        # -P: some scripts have the name of the package that they import.
        command = [str(home / "bin/python"), "-P", str(client.script)]
        install = [*command[:1], "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = json.dumps(client.packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([*install, *client.packages], check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        stamp.write_text(wanted)
    return [sys.executable, str(HERE / "agent.py"), client.name] if client.agent else command


def version_of(client: Client, home: Path) -> str:
    """The version of the client's first package."""
    name = re.split(r"[\[<>=]", client.packages[0])[0]
    if client.npm:
        return json.loads((home / "node_modules" / name / "package.json").read_text())["version"]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([str(home / "bin/python"), "-c", code], capture_output=True, text=True).stdout.strip()


@contextmanager
def server(log: Path, *options: str) -> Iterator[str]:
    """The URL of a server."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--served-model-name", "*", *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        while not (found := re.search(r"serving on (http://\S+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def start_servers(home: Path, chosen: list[Client], closing: ExitStack) -> dict[bool, str]:
    """The URLs of the servers for agents (True) and for other clients (False), as far as they are needed.

    Agents' own prompts are longer than the default model's context, so they have a random model with a longer one.
    """
    urls = {}
    if any(client.agent for client in chosen):
        options = ("--model", str(closing.enter_context(small_model())), "--random-weights", "--pool-tokens", "131072")
        urls[True] = closing.enter_context(server(home / "agents.log", *options))
    if not all(client.agent for client in chosen):
        # In float32 an answer and its stream are the same, whatever is cached.
        options = ("--dtype", "float32", "--pool-tokens", "65536")
        urls[False] = closing.enter_context(server(home / "server.log", *options))
    return urls


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Node.js v")]
    return lines[-1][:160] if lines else ""


def run(client: Client, home: Path, url: str, words: int) -> tuple[str, str, str]:
    """Whether the client works, its version, and the last line that it printed."""
    if client.npm and shutil.which("npm") is None:
        return "not tried", "", "npm is not installed"
    try:
        command = set_up(client, home)
    except (subprocess.SubprocessError, OSError) as error:
        return "not tried", "", f"cannot be installed: {last_line(str(getattr(error, 'stderr', '') or error))}"
    environment = {**os.environ, "PATH": f"{home / 'node_modules/.bin'}:{home / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    arguments = [url, MODEL, str(words)] if client.agent else [url, MODEL]
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
            cwd=home,
        )
    except subprocess.TimeoutExpired:
        return "fails", version_of(client, home), f"it took longer than {PATIENCE_S} s"
    (home / "log").write_text(done.stdout + done.stderr)
    shown = last_line(done.stdout) if done.returncode == 0 else last_line(done.stderr) or last_line(done.stdout)
    return "works" if done.returncode == 0 else "fails", version_of(client, home), shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of clients; default: all")
    parser.add_argument("--url", help="of a server that runs; default: one is started")
    parser.add_argument("--words", type=int, default=0, help="put before agents' system prompts (default: %(default)s)")
    parser.add_argument(
        "--home", type=lambda text: Path(text).resolve(), default=ROOT / ".venv/clients", help="of the environments"
    )
    arguments = parser.parse_args()
    arguments.home = arguments.home.resolve()  # clients run within their environments
    chosen = [client for client in CLIENTS if not arguments.names or client.name in arguments.names]
    arguments.home.mkdir(parents=True, exist_ok=True)
    console, table = Console(), Table("client", "version", "", "")
    failed = 0
    with ExitStack() as closing:
        given = dict.fromkeys((True, False), arguments.url)
        urls = given if arguments.url else start_servers(arguments.home, chosen, closing)
        for client in chosen:
            console.print(f"{client.name} ...")
            result, version, line = run(client, arguments.home / client.name, urls[client.agent], arguments.words)
            failed += result == "fails"
            table.add_row(client.name, version, result, line)
            console.print(f"{client.name} {version} {result}: {line}", markup=False)
    console.print(table)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
