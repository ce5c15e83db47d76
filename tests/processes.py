"""Processes that talk by gloo, started once for the tests of a file."""

import os
import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
Both = Callable[..., None]


def work(rank: int, world: int, store: str, tasks: list[mp.Queue], done: mp.Queue) -> None:
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


LONGEST = 40
"""Seconds that a process waits for the others: what hangs fails."""


def started(world: int, store: str) -> Iterator[Both]:
    """Runs a function in each of some processes, which are started once."""
    context = mp.get_context("spawn")
    tasks, done = [context.Queue() for _ in range(world)], context.Queue()
    processes = [context.Process(target=work, args=(n, world, store, tasks, done), daemon=True) for n in range(world)]
    for process in processes:
        process.start()

    def run(function: Callable[..., None], *args: object) -> None:
        for own in tasks:
            own.put((function, args))
        try:
            wrong = "\n".join(filter(None, [done.get(timeout=1.5 * LONGEST) for _ in range(world)]))
        except queue.Empty:
            pytest.fail("a process hangs")
        assert not wrong, wrong

    yield run
    for own in tasks:
        own.put(None)
    for process in processes:
        process.join(timeout=10)
        process.kill()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Two processes."""
    yield from started(WORLD, str(tmp_path_factory.mktemp("store") / "file"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Four processes."""
    yield from started(4, str(tmp_path_factory.mktemp("store") / "file"))
