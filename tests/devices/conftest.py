from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU torch warns of its own: of each kernel of attention that it doesn't use, of streams that don't match."""
    for item in items if torch.cuda.is_available() else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
