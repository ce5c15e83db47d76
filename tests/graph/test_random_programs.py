"""A random program of 40 operations, edited at a random step, is right or refused in that very step."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_at_a_time import by_memo, judge
from random_programs import OPERATIONS, Program, Step

from autograd_hacks.graph.memo import Memo

steps = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5))
edits = st.tuples(st.integers(0, 39), st.sampled_from(["put", "insert", "drop"]), steps)


def edited(program: Sequence[Step], edit: tuple[int, str, Step]) -> list[Step]:
    at, how, step = edit
    found = list(program)
    at %= max(1, len(found))
    found[at : at + (how != "insert")] = [] if how == "drop" else [step]
    return found


LONG, SHORT = (st.lists(steps, min_size=least, max_size=most) for least, most in ((40, 40), (2, 8)))


@settings(max_examples=55)
@given(size=st.integers(2, 4), program=LONG | SHORT | SHORT, edit=edits, when=st.integers(1, 2))
def test_programs(size: int, program: list[Step], edit: tuple[int, str, Step], when: int) -> None:
    """Few short ones mix samples, so that more of their values have owners."""
    model, memo = Program(size), Memo()
    for step in range(3):
        model.program = edited(program, edit) if step == when else program
        x = torch.randn(size, size, size, dtype=torch.float64)
        out = model(x)
        found = judge([out], size, model, **by_memo(memo, out, size, model, [x]))
        assert not found.wrong, found.wrong
        assert found.rows < 1e-7, found.rows
