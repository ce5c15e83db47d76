from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU torch warns of its own: of each kernel of attention that it doesn't use, of streams that don't match."""
    let_warn([item for item in items if HERE in item.path.parents], torch.cuda.is_available())


def let_warn(items: list[pytest.Item], has_gpu: bool) -> None:
    for item in items if has_gpu else ():
        item.add_marker(pytest.mark.filterwarnings("default"))
