"""The tests by device, as a part of the GPU's benchmark.

Each file runs in a process of its own, so that one that fails, hangs or takes its process along is a row, and the rest goes
on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

Data = dict[str, Any]
TESTS = "tests"
HOUSE = Path(__file__).parents[1]
TINY = ("tests/devices/test_tf32.py::test_what_torch_is_told_is_known",)
"""What runs in a second."""
SECONDS = 240
"""That a file may take."""
NOTHING_TO_RUN = 5
"""pytest's exit status for it: a file of helpers, say."""


def files(tiny: bool) -> Sequence[str]:
    found = sorted((HOUSE / "tests" / "devices").glob("test_*.py"))
    return TINY if tiny else [str(file.relative_to(HOUSE)) for file in found]


def tested(found: Data, tiny: bool, until: float, keep: Callable[[], None]) -> bool:
    """Runs the files that have no row yet, and writes after each.  Returns whether all have run.

    found: {file: its row}    until: when time is up, by `perf_counter`    keep: writes what was found
    """
    for file in tqdm([name for name in files(tiny) if name not in found], desc="The tests by device"):
        left = until - perf_counter()
        if left <= 0:
            break
        row = run(file, min(SECONDS, left))
        if row["says"] == OUT_OF_TIME and left < SECONDS:  # it has not had its time, and is run again
            break
        found[file] = row
        keep()
    return set(found) == set(files(tiny))


OUT_OF_TIME = "took too long, and was ended"


def run(file: str, seconds: float) -> Data:
    """Whether a file's tests passed, pytest's last line, and the names of those that failed."""
    begun = perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", file]
    try:
        done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"passed": False, "says": OUT_OF_TIME, "failed": [], "seconds": perf_counter() - begun}
    lines = [line for line in done.stdout.splitlines() if line.strip()] or done.stderr.splitlines() or ["nothing"]
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED ", "ERROR "))]
    ended = "" if done.returncode in (0, 1, NOTHING_TO_RUN) else f" (ended with {done.returncode})"
    says = lines[-1].strip("= ") + ended
    return {"passed": done.returncode == 0, "says": says, "failed": failed, "seconds": perf_counter() - begun}
