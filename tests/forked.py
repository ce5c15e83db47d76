"""Processes that are forked off one that has imported torch, and scripts that are run in such, as a user runs them.

Imports take longer than many of the scripts.
"""

import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

IMPORTED = ["torch", "autograd_hacks", "matplotlib.pyplot", "scipy.stats", "sklearn.datasets", "tqdm"]
"""What nearly all scripts import."""


def forked() -> Any:
    """The context in which the processes are made."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_script(script: Path, folder: Path, options: Sequence[str] = (), without: str = "") -> tuple[str, str]:
    """What a script prints, and what it writes to stderr; it has ended without an error, and its picture is in the folder.

    folder: where it runs    without: packages that are not there
    """
    process = forked().Process(target=_run, args=(script, folder, options, without.split()))
    process.start()
    process.join()
    out, err = ((folder / name).read_text("utf-8") for name in ("out", "err"))
    assert process.exitcode == 0, err
    return out, err


def _run(script: Path, folder: Path, options: Sequence[str], without: Sequence[str]) -> None:
    os.chdir(folder)
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    warnings.simplefilter("ignore")
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]  # None, by which an import fails
    sys.argv = [script.name, *options]
    os.environ.pop("MPLBACKEND", None)  # the scripts find out that there is no display
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    plt.show = lambda: plt.savefig(folder / f"{script.stem}.png")
    runpy.run_path(str(script), run_name="__main__")
