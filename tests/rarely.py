"""Cases of a parametrised test that tox -e full runs, beside others that every run has."""

from typing import Any

import pytest


def rarely(*cases: Any) -> list[Any]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
