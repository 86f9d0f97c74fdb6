"""Checks grammars in processes that can be killed: llguidance's own limits do not bound the time of every grammar."""

import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import wait

from runtime.errors import InvalidRequest, Overloaded
from runtime.params import CONSTRAINTS, SamplingParams
from runtime.sampling.grammar import check_grammar, too_slow


class GrammarProcesses:
    """A pool of processes, each of which checks one grammar at a time. Each concurrent `check` uses one process."""

    def __init__(self, timeout_s: float):
        """`timeout_s`: time limit for one grammar."""
        self._timeout_s = timeout_s
        self._all: set[subprocess.Popen[bytes]] = set()
        self._idle: list[subprocess.Popen[bytes]] = []

    def check(self, params: SamplingParams) -> None:
        """`check_grammar` in a process; blocks. Also raises InvalidRequest if the check exceeds the time limit."""
        name = params.constraint or ""
        try:
            process = self._idle.pop() if self._idle else self._start()
            if process.poll() is not None:
                self._end(process)
                process = self._start()
        except OSError:
            raise Overloaded("no process could be started to check the grammar") from None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(params.model_dump_json(include={*CONSTRAINTS}).encode() + b"\n")
            process.stdin.flush()
            if not wait([process.stdout.fileno()], self._timeout_s):
                raise too_slow(name, self._timeout_s, name)
            answer = process.stdout.readline()
            if not answer:
                raise InvalidRequest(f"compiling {name} takes more memory than is available", param=name)
        except BaseException:
            self._end(process)
            raise
        self._idle.append(process)
        message, param = json.loads(answer)
        if message is not None:
            raise InvalidRequest(message, param=param)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "runtime.frontend.grammar_process"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._all.add(process)
        assert process.stdout is not None
        if not process.stdout.readline():  # imports do not count against the time limit
            self._end(process)
            raise OSError("it ended before it was ready")
        return process

    def close(self) -> None:
        """Kill all processes; a running `check` raises InvalidRequest."""
        for process in list(self._all):
            self._end(process)

    def forget(self) -> None:
        """Kill the idle processes, each of which still has the grammar that it checked last."""
        while self._idle:
            self._end(self._idle.pop())

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._all.discard(process)
        process.kill()
        process.wait()


def main() -> None:
    """Check one grammar per line of JSON on standard input. Ends with standard input, even during a check."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    print(flush=True)
    for line in sys.stdin.buffer:
        threading.Thread(target=_answer, args=(line,), daemon=True).start()
    os._exit(0)


def _answer(line: bytes) -> None:
    found: tuple[str | None, str | None] = (None, None)
    try:
        check_grammar(SamplingParams.model_construct(**json.loads(line)))
    except InvalidRequest as error:
        found = error.message, error.param
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
