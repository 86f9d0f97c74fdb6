"""Checks grammars in processes that can be killed: llguidance's own limits do not bound the time of every grammar."""

import json
import os
import signal
import sys
import threading
from typing import IO

from runtime.errors import InvalidRequest
from runtime.features.grammars.compiler import too_slow
from runtime.models.process_pool import ProcessPool
from runtime.params import CONSTRAINTS, SamplingParams


class GrammarProcesses(ProcessPool):
    """A pool of processes, each of which checks one grammar at a time. Each concurrent `check` uses one process."""

    def __init__(self, timeout_s: float):
        """`timeout_s`: time limit for one grammar."""
        super().__init__("check the grammar", ["-m", __name__], lambda answers: answers.readline())
        self._timeout_s = timeout_s

    def check(self, params: SamplingParams) -> None:
        """`check_grammar` in a process; blocks. Also raises InvalidRequest if the check exceeds the time limit."""
        name = params.constraint or ""
        line = params.model_dump_json(include={*CONSTRAINTS}).encode() + b"\n"

        def write(requests: IO[bytes]) -> None:
            requests.write(line)
            requests.flush()

        answer = self.ask(write, self._timeout_s)
        if answer is None:
            raise too_slow(name, self._timeout_s, name)
        if not answer:
            raise InvalidRequest(f"compiling {name} takes more memory than is available", param=name)
        message, param = json.loads(answer)
        if message is not None:
            raise InvalidRequest(message, param=param)


def main() -> None:
    """Check one grammar per line of JSON on standard input. Ends with standard input, even during a check."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    import runtime.features.grammars.grammar  # noqa: F401  (llguidance takes a while, which is no grammar's)

    print(flush=True)
    for line in sys.stdin.buffer:
        threading.Thread(target=_answer, args=(line,), daemon=True).start()
    os._exit(0)


def _answer(line: bytes) -> None:
    from runtime.features.grammars.grammar import check_grammar

    found: tuple[str | None, str | None] = (None, None)
    try:
        check_grammar(SamplingParams.model_construct(**json.loads(line)))
    except InvalidRequest as error:
        found = error.message, error.param
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
