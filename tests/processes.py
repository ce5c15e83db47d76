"""Processes that talk by gloo, started once for all tests."""

import os
import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked

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
