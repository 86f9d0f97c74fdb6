"""Problems of HumanEval: prompts of a chat, programs in answers, and their tests in a process of their own."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel, ValidationError

from loadgen.harness import BenchError
from loadgen.harness.lines import UNREADABLE, numbered_lines

_ASKED = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{}```"
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_SECONDS = 10.0


class Problem(BaseModel):
    """A line of HumanEval: the head of a function with its docstring, and a program that tests the function."""

    task_id: str
    prompt: str
    entry_point: str
    test: str

    @property
    def asked(self) -> str:
        """The user's message."""
        return _ASKED.format(self.prompt)

    def program(self, answer: str) -> str:
        """The answer's first block of code behind the prompt, which may define what the code calls, and the test."""
        found = _BLOCK.search(answer)
        code = found[1] if found else answer
        return "\n\n".join((self.prompt, code, self.test, f"check({self.entry_point})\n"))

    def is_solved(self, answer: str, seconds: float = _SECONDS) -> bool:
        """Whether the answer's program passes its test in this time."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                ended = subprocess.run(
                    [sys.executable, "-I", "-"],
                    input=self.program(answer).encode(errors="replace"),
                    cwd=folder,
                    capture_output=True,
                    timeout=seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
        return ended.returncode == 0


def read_problems(path: Path) -> list[Problem]:
    """The problems of a file, which may be compressed (`.gz`). Raises BenchError."""
    try:
        return [Problem.model_validate_json(line) for _, line in numbered_lines(path)]
    except (*UNREADABLE, ValidationError) as error:
        raise BenchError(f"{path} is no file of HumanEval: {error}") from None
