"""Which values are numbers, NumPy's too."""

from numbers import Integral, Real


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
