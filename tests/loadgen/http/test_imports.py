"""Benches over HTTP import neither torch nor matplotlib."""

from __future__ import annotations

import subprocess
import sys


def test_a_bench_over_http_is_chosen_without_torch_and_matplotlib():
    code = "import sys\nfrom loadgen.__main__ import main\nmain()\nprint({'torch', 'matplotlib'} & {*sys.modules})"
    command = [sys.executable, "-c", code, "serve", "--requests", "1", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cannot be reached" in done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
