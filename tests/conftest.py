import gc
import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from hypothesis import settings
from processes import both, four
from steps import mlp

import autograd_hacks

__all__ = ["both", "four"]  # fixtures, each once for all files

# In CI the same examples in every run, so that a red run is the change's doing; elsewhere new ones each time.
settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("local", deadline=None, max_examples=30, print_blob=True)
# By tox -e full.
settings.register_profile("hunt", settings.get_profile("ci" if os.environ.get("CI") else "local"), max_examples=600)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Tests run in parallel processes, and so do the programs that they start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What was imported stays: without, a collection takes a third of a second, and tests of memory make many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_start() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    autograd_hacks.enable_hooks()


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    """The small one of `steps`, hooked."""
    model = mlp()
    with autograd_hacks.add_hooks(model):
        yield model


@pytest.fixture
def compiled_anew() -> None:
    torch._dynamo.reset()


@pytest.fixture
def double() -> Iterator[None]:
    """Tensors are of double precision unless something else is said."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device that this machine has."""
    return torch.device(request.param)
