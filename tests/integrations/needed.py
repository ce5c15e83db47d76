"""Tools that integrations are tested with."""

import importlib
import os
import warnings
from types import ModuleType

import pytest


def needed(*names: str) -> ModuleType:
    """Imports tools, and returns the first.  Where one is not installed the file is skipped; not in CI, which has all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of which tests make errors
        try:
            first, *_ = [importlib.import_module(name) for name in names]
            return first
        except ModuleNotFoundError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{names[0]} is not installed ({error}); tox -e py brings it", allow_module_level=True)
