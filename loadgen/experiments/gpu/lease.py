"""`python -m loadgen.experiments.gpu.lease OUT --seconds N`: all that minutes on a GPU can show.

The most valuable comes first. Each part runs in a process of its own with a limit, so that one that fails, hangs or
loses the device hurts itself alone. Parts that no longer fit are left out. OUT gets `gpu.md` (targets beside figures),
`lease.json` and `log.txt`; the same command goes on from there. This script needs nothing but Python.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.experiments.gpu.lease_page import page
from loadgen.experiments.gpu.lease_parts import Part, parts
from loadgen.experiments.gpu.metadata import write_metadata

_ROOT = Path(__file__).parents[3]
# Seconds that are kept for the page.
_RESERVE = 5
# Largest part of a part's log that is kept, in bytes.
_LOG = 400_000
# Processes that a part may take, if each of them dies with another cell.
_TRIES = 4
_INSTALL = "install"


def main() -> int:
    """Measure and write the page. Returns 1 if a part failed or was left out."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.experiments.gpu.lease", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, required=True, help="in which all must end")
    parser.add_argument(
        "--carried", type=Path, metavar="DIR", help="as written by `prepare` beside this; it is installed"
    )
    parser.add_argument("--parts", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny models")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds - _RESERVE
    model = None if arguments.carried is None else arguments.carried.resolve() / "model"
    every = parts(arguments.rehearse, str(model) if model is not None and model.exists() else None)
    wanted = [part for part in every if not arguments.parts or part.name in arguments.parts]
    with tempfile.TemporaryDirectory(prefix="ramet-lease-") as work:
        lease = Lease(arguments.out, Path(work), deadline)
        return lease.run(wanted, arguments.carried)


@dataclass
class Lease:
    """A run of all parts within a time.

    Attributes:
        out: folder of the results.
        work: folder for what is installed and written meanwhile.
        deadline: of `time.monotonic`.
        found: by part: `rc`, `seconds`, `error` (empty: none) and `lines` (records of the bench's file).
    """

    out: Path
    work: Path
    deadline: float
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    _path: list[str] = field(default_factory=lambda: [str(_ROOT)])

    def run(self, wanted: Sequence[Part], carried: Path | None) -> int:
        """Run the parts that earlier runs have not ended. Returns 1 if a part failed or was left out."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._read()
        try:
            if carried is not None:
                self._install(carried.resolve())
            self._call(
                "shapes", ["-m", "loadgen.experiments.gpu.shapes", str(self.work / "shapes"), *_tokenizer(carried)], 60
            )
            for part in wanted:
                if self.found.get(part.name, {}).get("rc") != 0:
                    self._part(part)
                    self._write()
        finally:
            self._write()
        return int(any(self.found[part.name]["rc"] != 0 for part in wanted))

    def _read(self) -> None:
        """Go on with the results of an earlier run, if they are of this GPU."""
        path, gpu = self.out / "lease.json", _gpu()
        if path.exists():
            before = json.loads(path.read_text("utf-8"))
            if before["gpu"] == gpu:
                self.found = before["parts"]
            else:
                path.rename(self.out / "lease-of-another-gpu.json")
        self._facts = {"gpu": gpu}

    def _write(self) -> None:
        whole = self._facts | {"parts": self.found}
        half = self.out / "lease.part"
        half.write_text(json.dumps(whole), encoding="utf-8")
        half.rename(self.out / "lease.json")
        (self.out / "gpu.md").write_text(page(whole), encoding="utf-8")

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    # -- what the parts need -------------------------------------------------------------------------------------

    def _install(self, carried: Path) -> None:
        """Install the wheels and unpack the kernels for the parts' processes, beside what is there."""
        site, kernels = self.work / "site", self.work / "kernels"
        options = [
            *("-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site))
        ]
        wheels = sorted(map(str, (carried / "wheels").glob("*.whl")))
        self._call(_INSTALL, ["-m", "pip", "install", *options, *wheels], 120)
        if (archive := carried / "kernels.tar.xz").exists():
            with tarfile.open(archive) as packed:
                packed.extractall(kernels, filter="data")
        write_metadata(site)
        self._path = [str(site), str(kernels), *self._path]

    def _call(self, name: str, command: list[str], most: float) -> None:
        """Run a command that measures nothing, and note its end."""
        started = time.monotonic()
        rc, error = self._process(command, self.work / "none", min(most, self._left()), most)
        self.found[name] = {"rc": rc, "seconds": time.monotonic() - started, "error": error, "lines": []}

    # -- parts ---------------------------------------------------------------------------------------------------

    def _part(self, part: Part) -> None:
        """Run a part, in further processes as long as one dies with a cell that the next one leaves out."""
        before = self.found.get(part.name, {"lines": []})
        file = self.work / f"{part.name.replace(' ', '-')}.jsonl"
        # What failed earlier is tried again.
        _write_lines(file, [line for line in before["lines"] if "error" not in line])
        started, rc, error = time.monotonic(), -1, "left out: no time"
        until = min(self.deadline, started + part.most)
        for _ in range(_TRIES):
            left = until - time.monotonic()
            if left < part.least:
                break
            lines = len(_lines(file))
            options = ["--json", str(file), "--resume", "--guard", "--repeats", "1", "--limit", str(max(left - 10, 1))]
            command = [word.replace("shapes/", f"{self.work / 'shapes'}/") for word in part.command]
            rc, error = self._process([*command, *options], file, left, part.stall)
            if rc == 2 and lines and len(_lines(file)) == lines:
                file.unlink()  # an earlier version's, or another processor's
            elif rc in (0, 1, 3) or len(_lines(file)) == lines:
                break
        seconds, records = time.monotonic() - started, _lines(file)
        if rc == 1 and len(records) < 2:
            error = "no cells"
        self.found[part.name] = {"rc": rc, "seconds": seconds, "error": error, "lines": records}

    def _process(self, command: list[str], file: Path, most: float, stall: float) -> tuple[int, str]:
        """Run Python until it ends, `most` seconds are over, or `file` has not grown for `stall` seconds.

        Returns the exit code, and what went wrong.
        """
        print(f"{self._left():5.0f} s left: {' '.join(command)}".splitlines()[0][:200], flush=True)
        log = self.work / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, *command], cwd=_ROOT, env=self._environment(), stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        ended, size, moved, why = time.monotonic() + most, -1, time.monotonic(), ""
        while child.poll() is None:
            now, grown = time.monotonic(), file.stat().st_size if file.exists() else 0
            if grown != size:
                size, moved = grown, now
            if now > ended or now > moved + stall:
                why = "no time left" if now > ended else f"nothing new for {stall:.0f} s"
                os.killpg(child.pid, signal.SIGKILL)
                break
            time.sleep(0.1)
        rc = child.wait()
        text = log.read_bytes()
        with (self.out / "log.txt").open("ab") as whole:
            whole.write(f"\n== {' '.join(command)}: {rc} {why}\n".encode() + text[-_LOG:])
        if why:
            return rc, f"killed: {why}"
        last = [line for line in text.decode(errors="replace").splitlines() if line.strip()][-1:]
        known = {1: "cells failed", 3: "not all cells: no time"} if "--json" in command else {}
        return rc, ({0: ""} | known).get(rc, f"exit status {rc}: {' '.join(last)}")

    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": os.pathsep.join(self._path), "FLASHINFER_DISABLE_JIT": "1", "PYTHONUNBUFFERED": "1"}
        # There is no internet: what is missing fails at once.
        own |= {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "FLASHINFER_WORKSPACE_BASE": str(self.work)}
        return os.environ | own


def _tokenizer(carried: Path | None) -> list[str]:
    """The model whose tokenizer the shapes get; without one, the default model."""
    return [] if carried is None else [str(carried.resolve() / "model")]


def _lines(file: Path) -> list[dict[str, Any]]:
    """The records of a bench's file; a torn last line is left out."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    if lines:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _gpu() -> str | None:
    """Name and driver of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.splitlines()[0] if found.returncode == 0 and found.stdout else None


if __name__ == "__main__":
    raise SystemExit(main())
