"""Two processes that talk by gloo, started once for the tests of a file."""

import os
import queue
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
Both = Callable[..., None]


def work(rank: int, store: str, tasks: list[mp.Queue], done: mp.Queue) -> None:
    """A process: runs what it is sent, and answers with what that raised."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for function, args in iter(tasks[rank].get, None):
        torch.manual_seed(0)
        try:
            function(*args)
            done.put("")
        except BaseException:
            done.put(f"process {rank}:\n{traceback.format_exc()}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Runs a function in each of two processes, which are started once."""
    context = mp.get_context("spawn")
    tasks, done = [context.Queue() for _ in range(WORLD)], context.Queue()
    store = str(tmp_path_factory.mktemp("store") / "file")
    processes = [context.Process(target=work, args=(rank, store, tasks, done), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()

    def run(function: Callable[..., None], *args: object) -> None:
        for own in tasks:
            own.put((function, args))
        try:
            wrong = "\n".join(filter(None, [done.get(timeout=60) for _ in range(WORLD)]))
        except queue.Empty:
            pytest.fail("a process hangs")
        assert not wrong, wrong

    yield run
    for own in tasks:
        own.put(None)
    for process in processes:
        process.join(timeout=10)
        process.kill()
