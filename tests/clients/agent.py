"""Coding agents: `agent.py NAME URL MODEL WORDS` has two turns with one, and a call of a tool in the first.

A random model calls no tool by itself. So a proxy between agent and server forces the first call and its arguments; it
also ends answers at the first vowel. The agent runs the tool and sends its result, as with any model. The script raises
if a request fails, if the agent closes a connection before its answer ends, if no result comes back, or if the second
turn does not send the first one again. WORDS random words are put before every system prompt, so that the first prefill
takes as long as an agent's own prompt on a slow machine.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

PATIENCE_S = 600
# Tools that change nothing, by agents.
HARMLESS = (
    "Read",
    "read",
    "read_file",
    "list_directory",
    "glob",
    "update_plan",
    "shell_command",
    "exec_command",
    "bash",
    "shell",
    "read_files",
    "run_commands",
)
FILE = "hello.txt"
MOST_TOKENS, VOWELS = 120, [*"aeiou"]

Turns = tuple[dict[str, str], list[str], list[str]]


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the server, and forces the first call."""

    server_url = ""
    home = Path()
    seen: ClassVar[list[tuple[str, dict[str, Any], int]]] = []
    firsts_s: ClassVar[list[float]] = []
    gaps_s: ClassVar[list[float]] = []
    requests_s: ClassVar[list[float]] = []
    left: ClassVar[list[str]] = []
    forced = False
    preface = ""

    def do_GET(self) -> None:
        self._pass(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        asked = json.loads(body) if body else {}
        for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
            if name in asked:
                asked[name] = min(asked[name], MOST_TOKENS)
        if Proxy.preface and {"messages", "input"} & asked.keys():
            _add_preface(asked, Proxy.preface)
        forces = not Proxy.forced and bool(asked.get("tools")) and self._force(asked)
        if not forces and "/v1/" in self.path:
            is_message = self.path.startswith("/v1/messages")
            asked |= {"stop_sequences": VOWELS} if is_message else {"stop": VOWELS, "min_tokens": 6}
        self._pass(json.dumps(asked).encode(), asked)
        Proxy.forced = Proxy.forced or forces

    def _force(self, asked: dict[str, Any]) -> bool:
        """Make a request call a tool that changes nothing; False if it has no such tool."""
        tools = [tool.get("function", tool) for tool in asked["tools"]]
        tool = next((tool for name in HARMLESS for tool in tools if tool.get("name") == name), None)
        if tool is None:
            return False
        name, key = tool["name"], "input_schema" if "input_schema" in tool else "parameters"
        wanted = tool[key].get("required") or [*tool[key]["properties"]][:1]
        given = {one: {"enum": [_argument(one, tool[key]["properties"][one])]} for one in wanted}
        tool[key] = {"type": "object", "properties": given, "required": wanted, "additionalProperties": False}
        kinds: dict[str, Any] = {
            "messages": {"type": "tool", "name": name},
            "responses": {"type": "function", "name": name},
            "completions": {"type": "function", "function": {"name": name}},
        }
        asked["tool_choice"] = kinds[urlsplit(self.path).path.rsplit("/", 1)[1]]
        return True

    def _pass(self, body: bytes, asked: dict[str, Any] | None = None) -> None:
        url = urlsplit(Proxy.server_url)
        connection = HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        started_s = sent_s = time.monotonic()
        connection.request(self.command, self.path, body, kept)
        answer = connection.getresponse()
        if asked is not None:
            Proxy.seen.append((self.path, asked, answer.status))
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        measured = Proxy.firsts_s
        while piece := answer.read1(1 << 16):
            if asked and asked.get("stream") and b"data: " in piece:  # agents do not see comments
                now_s = time.monotonic()
                measured.append(now_s - sent_s)
                measured, sent_s = Proxy.gaps_s, now_s
            try:
                self.wfile.write(piece)
                self.wfile.flush()
            except OSError:
                Proxy.left.append(f"{self.path} after {time.monotonic() - started_s:.1f} s")
                break
        Proxy.requests_s.append(time.monotonic() - started_s)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def _add_preface(asked: dict[str, Any], preface: str) -> None:
    """Put text before the system prompt of a request of any of the three APIs."""
    if "system" in asked:
        system = asked["system"]
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        asked["system"] = [{"type": "text", "text": preface}, *blocks]
    elif asked.get("instructions"):
        asked["instructions"] = f"{preface}\n{asked['instructions']}"
    else:
        turns = "messages" if "messages" in asked else "input"
        asked[turns] = [{"role": "system", "content": preface}, *asked[turns]]


def _argument(name: str, schema: dict[str, Any]) -> Any:
    """An argument of the forced call: the file's name, or a command that shows the file."""
    if name in ("command", "cmd"):
        return ["cat", FILE] if schema.get("type") == "array" else f"cat {FILE}"
    if schema.get("type") == "array":
        return [{"step": "read", "status": "completed"}] if name == "plan" else [FILE]
    return str(Proxy.home / FILE) if "path" in name else FILE


def claude_code(home: Path, url: str, model: str) -> Turns:
    env = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": model,
    }
    env |= {"ANTHROPIC_SMALL_FAST_MODEL": model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    ask = ["claude", "--tools", "Read", "--system-prompt", "Be brief.", "-p"]
    return env, [*ask, "Say hello."], [*ask, "And again.", "--continue"]


def codex(home: Path, url: str, model: str) -> Turns:
    (home / "brief.md").write_text("Be brief.")
    (home / "config.toml").write_text(f"""model = "{model}"
model_provider = "ramet"
model_context_window = 32768
model_instructions_file = "{home / "brief.md"}"
[features]
goals = false
multi_agent = false
[model_providers.ramet]
name = "Ramet"
base_url = "{url}/v1"
wire_api = "responses"
""")
    ask = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only"]
    return {"CODEX_HOME": str(home)}, [*ask, "Say hello."], [*ask, "resume", "--last", "And again."]


def opencode(home: Path, url: str, model: str) -> Turns:
    config, limit = home / "opencode.json", {"context": 32768, "output": 64}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {model: {"limit": limit}}}
    agent = {"build": {"prompt": "Be brief.", "tools": {"*": False, "read": True}}}
    config.write_text(json.dumps({"provider": {"ramet": provider}, "agent": agent, "autoupdate": False}))
    env = {"XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home), "OPENCODE_CONFIG": str(config)}
    ask = ["opencode", "run", "--model", f"ramet/{model}"]
    return env | {"OPENCODE_DISABLE_MODELS_FETCH": "1"}, [*ask, "Say hello."], [*ask, "--continue", "And again."]


def qwen_code(home: Path, url: str, model: str) -> Turns:
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": model, "QWEN_SYSTEM_MD": ""}
    (home / "system.md").write_text("Be brief.")
    env |= {"QWEN_SYSTEM_MD": str(home / "system.md"), "QWEN_TELEMETRY_ENABLED": "false"}
    tools = ["--core-tools", "read_file", "--core-tools", "list_directory"]
    ask = ["qwen", "--auth-type", "openai", *tools, "-p"]
    return env, [*ask, "Say hello."], [*ask, "And again.", "--continue"]


def pi(home: Path, url: str, model: str) -> Turns:
    settings = home / ".pi/agent"
    settings.mkdir(parents=True)
    one = {"id": model, "name": model, "contextWindow": 32768, "maxTokens": 64, "reasoning": False, "input": ["text"],
           "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}  # fmt: skip
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [one]}
    (settings / "models.json").write_text(json.dumps({"providers": {"ramet": provider}}))
    ask = ["pi", "--provider", "ramet", "--model", model, "-p"]
    return {"PI_OFFLINE": "1"}, [*ask, "Say hello."], [*ask, "--continue", "And again."]


def cline(home: Path, url: str, model: str) -> Turns:
    auth = ["cline", "auth", "--provider", "openai", "--apikey", "none", "--modelid", model, "--baseurl", f"{url}/v1"]
    run(auth, {}, home)
    return {}, ["cline", "Say hello."], []  # it goes on in a terminal alone


def aider(home: Path, url: str, model: str) -> Turns:
    """It has no tools: files come as text."""
    env = {
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "AIDER_ANALYTICS": "false",
    }
    ask = ["aider", "--model", f"openai/{model}", "--no-git", "--yes-always", "--no-show-model-warnings", "--no-pretty",
           "--chat-history-file", str(home / "history.md"), "--chat-mode", "ask", "--message"]  # fmt: skip
    return env, [*ask, "Say hello."], [*ask, "And again.", "--restore-chat-history"]


def continue_cli(home: Path, url: str, model: str) -> Turns:
    one = {"name": model, "model": model, "provider": "openai", "apiBase": f"{url}/v1", "apiKey": "none"}
    one |= {"roles": ["chat"], "capabilities": ["tool_use"]}
    one |= {"defaultCompletionOptions": {"maxTokens": 64, "contextLength": 32768}}
    config = {"name": "ramet", "version": "1.0.0", "schema": "v1", "models": [one]}
    (home / "config.yaml").write_text(json.dumps(config))
    ask = ["cn", "--config", str(home / "config.yaml"), "--readonly", "-p"]
    return {"CONTINUE_TELEMETRY_ENABLED": "0"}, [*ask, "Say hello."], [*ask, "And again.", "--resume"]


def goose(home: Path, url: str, model: str) -> Turns:
    env = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": model, "OPENAI_HOST": url, "OPENAI_API_KEY": "none"}
    env |= {"GOOSE_DISABLE_KEYRING": "1", "GOOSE_MODE": "auto", "GOOSE_CONTEXT_LIMIT": "32768"}
    ask = ["goose", "run", "--with-builtin", "developer", "--name", "hello"]
    return env, [*ask, "--text", "Say hello."], [*ask, "--resume", "--text", "And again."]


AGENTS: dict[str, Callable[[Path, str, str], Turns]] = {
    each.__name__: each for each in (claude_code, codex, opencode, qwen_code, pi, cline, aider, continue_cli, goose)
}
TOOLLESS = {"aider"}


def run(command: list[str], env: dict[str, str], home: Path) -> str:
    """What an agent prints. Raises RuntimeError if it fails."""
    done = subprocess.run(
        command, env=os.environ | {"HOME": str(home), "PWD": str(home)} | env, cwd=home, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}: {(done.stderr or done.stdout)[-900:]}")
    return done.stdout


def main() -> None:
    name, url, model, words = sys.argv[1:]
    Proxy.server_url = url
    syllables = ["ba", "ko", "mi", "ter", "san", "lu", "ren", "dop"]
    Proxy.preface = " ".join("".join(random.choices(syllables, k=3)) for _ in range(int(words)))
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    home = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (home / FILE).write_text("Hello from a file.")
    Proxy.home = home
    env, first, second = AGENTS[name](home, f"http://127.0.0.1:{proxy.server_port}", model)
    run(first, env, home)
    turns = len(Proxy.seen)
    if second:
        run(second, env, home)
    if failed := [(path, status) for path, _, status in Proxy.seen if status != 200]:
        raise RuntimeError(f"requests failed: {failed}")
    if Proxy.left:
        raise RuntimeError(f"closed before their answers ended: {Proxy.left}")
    sent = [json.dumps(body) for _, body, _ in Proxy.seen]
    kinds = ('"tool_result"', '"role": "tool"', "call_output")
    if name not in TOOLLESS and not any(kind in body for kind in kinds for body in sent):
        raise RuntimeError("no result of a tool came back")
    if second and not any("Say hello." in body and "And again." in body for body in sent):
        raise RuntimeError("the second turn does not send the first one")
    requests = (
        f"{turns} and {len(Proxy.seen) - turns} requests, {'without tools' if name in TOOLLESS else 'with a tool'}"
    )
    first_s, gap_s = (max(times, default=math.nan) for times in (Proxy.firsts_s, Proxy.gaps_s))
    longest_s = max(Proxy.requests_s)
    print(
        f"{requests}, of {longest_s:.1f} s at most; "
        f"first events within {first_s:.1f} s, events {gap_s:.1f} s apart at most"
    )


main()
