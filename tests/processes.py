"""Processes that are forked off one that has imported torch: some that talk by gloo, started once, and scripts.

Imports take longer than many of the scripts.
"""

import gc
import os
import queue
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = ["torch", "autograd_hacks", "matplotlib.pyplot", "scipy.stats", "sklearn.datasets", "tqdm"]
"""What nearly all scripts import."""


def forked() -> Any:
    """The context in which the processes are made."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


WORLD = 2
Both = Callable[..., None]


def work(rank: int, world: int, store: str, tasks: list[Any], done: Any) -> None:
    """A process: runs what it is sent, and answers with what that raised."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait = timedelta(seconds=LONGEST)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    for function, args in iter(tasks[rank].get, None):
        gc.collect()
        gc.freeze()  # as in conftest.py: what was imported is looked through no more
        torch.manual_seed(0)
        try:
            function(*args)
            done.put("")
        except BaseException:
            done.put(f"process {rank}:\n{traceback.format_exc()}")
    dist.destroy_process_group()


LONGEST = 400
"""Seconds that a process waits for the others: what hangs fails, and a machine with other work is no hang."""


class Started:
    """Runs a function in each of some processes, which are started once, and anew where one has failed."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world, self.folder, self.processes = world, folder, list[Any]()

    def start(self) -> None:
        context, store = forked(), str(self.folder / f"{len(list(self.folder.iterdir()))}")
        self.tasks, self.done = [context.Queue() for _ in range(self.world)], context.Queue()
        for rank in range(self.world):
            args = (rank, self.world, store, self.tasks, self.done)
            self.processes.append(context.Process(target=work, args=args, daemon=True))
            self.processes[-1].start()

    def __call__(self, function: Callable[..., None], *args: object) -> None:
        if not self.processes:
            self.start()
        for own in self.tasks:
            own.put((function, args))
        try:
            wrong = "\n".join(filter(None, [self.done.get(timeout=LONGEST + 60) for _ in range(self.world)]))
        except queue.Empty:
            wrong = "a process hangs"
        if wrong:  # they may be out of step now
            self.end(0)
            pytest.fail(wrong)

    def end(self, wait: float = 10) -> None:
        for own in self.tasks if self.processes else ():
            own.put(None)
        for process in self.processes:
            process.join(timeout=wait)
            process.kill()
        self.processes = []


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Two processes."""
    group = Started(WORLD, tmp_path_factory.mktemp("store"))
    yield group
    group.end()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Four processes."""
    group = Started(4, tmp_path_factory.mktemp("store"))
    yield group
    group.end()


def in_both(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a function that two processes run."""

    @wraps(function)
    def test(both: Both | None = None, **given: Any) -> None:
        function(**given) if both is None else both(partial(test, **given))

    own = signature(function)
    parameters = [*own.parameters.values(), Parameter("both", Parameter.KEYWORD_ONLY)]
    test.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return test


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
