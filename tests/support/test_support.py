"""Values by tensor, the modules of a model, the leaves of a tree, and tables."""

import re
from collections import namedtuple
from html import escape
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from nets import Hiding, Slotted
from torch.utils.checkpoint import checkpoint

from autograd_hacks.errors import UnseenGradient
from autograd_hacks.support.display import Shown, Table, bytes_of, with_unit
from autograd_hacks.support.graph import Value
from autograd_hacks.support.row_files import digest_of
from autograd_hacks.support.sweep import sweep
from autograd_hacks.support.trees import Tree


def test_no_gradient_is_brought_through_a_reentrant_checkpoint() -> None:
    w = torch.randn(3, requires_grad=True)
    made = checkpoint(torch.tanh, w, use_reentrant=True)
    with pytest.raises(UnseenGradient, match="use_reentrant=False"):
        sweep({Value(made.grad_fn, 0): torch.ones(3)}, lambda node, grads: None)
    assert w.grad is None


def _renamed(model: Any) -> None:
    name, p = model[0]._parameters.popitem()
    model[0]._parameters[f"{name} again"] = p


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: model.append(nn.Linear(2, 2)),
        lambda model: model.__setitem__(1, nn.Linear(2, 3)),
        lambda model: model[0].register_module("inside", nn.Linear(2, 2)),
        lambda model: model[0].register_parameter("weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: model[0].register_parameter("bias", None),
        lambda model: setattr(model[1], "weight", model[0].weight),
        lambda model: model.__delitem__(0),
        _renamed,
    ],
)
def test_a_tree_sees_whatever_changes_in_a_model(change: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    tree = Tree(model)
    for _ in range(2):
        assert tree.modules() == list(model.modules())
        assert [(n, id(p)) for n, p in tree.parameters().items()] == [(n, id(p)) for n, p in model.named_parameters()]
        change(model)
    assert tree.modules() == list(model.modules())
    assert [(n, id(p)) for n, p in tree.parameters().items()] == [(n, id(p)) for n, p in model.named_parameters()]


def test_a_tree_sees_what_modules_begin_to_keep() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    tree, x = Tree(model), torch.ones(2)
    changes: list[Any] = [
        lambda own: own.update(kept=None),  # simple now, a tensor later
        lambda own: own.update(kept=x),
        lambda own: (own.pop("kept"), own.update(other=[x])),  # as many as before
        lambda own: own.update(more={"x": x}),
        lambda own: own.pop("more"),
    ]
    for change in changes:
        tree.modules()
        change(vars(model[1]))
        own = vars(model[1])
        expected = [own[name] for name in ("kept", "more", "other") if own.get(name) is not None]
        assert [*map(id, tree.kept())] == [*map(id, expected)]


# What tells batches from others: their numbers, and not where they lie


Pair = namedtuple("Pair", ["x", "y"])
LONG = np.arange(3000)
KINDS = {
    "tensors": lambda k: torch.arange(5) + k,
    "sparse": lambda k: torch.eye(3).mul(k + 1).to_sparse(),
    "sparse rows": lambda k: torch.eye(3).mul(k + 1).to_sparse_csr(),
    "nested": lambda k: torch.nested.nested_tensor([torch.ones(2), torch.ones(3) + k], layout=torch.jagged),
    "conjugates": lambda k: torch.complex(torch.ones(2), torch.ones(2) + k).conj(),
    "negatives": lambda k: torch.complex(torch.ones(2), torch.ones(2) + k).conj().imag,
    "long arrays": lambda k: np.concatenate([LONG[:1000], LONG[1000:2000][:: -1 if k else 1], LONG[2000:]]),
    "arrays of objects": lambda k: np.array([Hiding(1), Hiding(k)], dtype=object),
    "lists": lambda k: [1, 12] if k else [11, 2],
    "dictionaries": lambda k: {"a": Hiding(1), "b": [k, torch.ones(1)]},
    "named tuples": lambda k: Pair(k, torch.ones(2)),
    "objects in circles": lambda k: Hiding(torch.ones(2) * k),
    "objects with slots": lambda k: Slotted(torch.ones(2) * k),
}


@pytest.mark.filterwarnings("ignore")  # sparse and nested tensors are young
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_and_others(kind: str) -> None:
    make = KINDS[kind]
    kept = [make(0), make(0), make(1)]  # each at an address of its own
    one, same, other = map(digest_of, kept)
    assert one == same != other
    assert digest_of(kept[0], before=one) != one


def test_things_that_come_again() -> None:
    first, second = [1], [2]
    assert digest_of([first, second, first]) != digest_of([first, second, second])
    assert digest_of([first, first]) == digest_of([[1], [1]]), "by what they are, and not by which"


def test_functions_are_told_by_name_and_not_by_address() -> None:
    assert digest_of([lambda: 1]) == digest_of([lambda: 1])


# Tables: their text and their HTML say the same


HEADER = ("parameter", "bytes")


def test_text_and_html_have_the_same_rows() -> None:
    table = Table("a model & more", (HEADER, ("<weight>", "12 B"), ("bias", "4 B")), "a note\nof two lines")
    lines = table.text().split("\n")
    assert lines[:3] == ["a model & more", "parameter  bytes", "---------  -----"]
    assert lines[3:] == ["<weight>   12 B", "bias       4 B", "a note", "of two lines"]
    assert re.findall(r"<pre[^>]*>(.*)</pre>", table.html(), re.DOTALL) == [escape(table.text())]


def test_a_long_table_is_shortened_in_the_middle() -> None:
    rows = [(f"layers.{k}.weight", f"{k} B") for k in range(1000)]
    for table in (Table("many", (HEADER, *rows)), Table("many", (HEADER, *rows[:26]))):
        text = table.text().split("\n")
        assert len(text) == 3 + 24 + 1
        assert text[3].startswith("layers.0.weight")
        assert text[-1].startswith(table.rows[-1][0])
        assert text[3 + 12] == f"... {len(table.rows) - 25} more"
    assert "more" not in Table("few", (HEADER, *rows[:25])).text()
    assert "more" not in Table("whole", (HEADER, *rows), is_whole=True).text()


def test_a_table_without_rows_is_a_line() -> None:
    assert Table("nothing yet").text() == "nothing yet"


@pytest.mark.parametrize(
    ("size", "says"), [(None, ""), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345, "12.3 kB"), (5 * 10**12, "5000 GB")]
)
def test_sizes(size: int | None, says: str) -> None:
    assert with_unit(size) == says


def test_bytes_count_memory_once() -> None:
    x = torch.zeros(10, 4)
    assert bytes_of([x, x, x.view(4, 10), x.detach()]) == 160
    assert bytes_of([x[:2], x[2:4]]) == 64
    assert bytes_of([x, x[:2]]) == 160
    assert bytes_of([torch.zeros(4, 1).expand(4, 1000)]) == 16
    assert bytes_of([torch.zeros(3, device="meta"), torch.zeros(5, device="meta")]) == 32
    assert bytes_of([torch.zeros(0)]) == bytes_of([]) == 0
    sparse = torch.eye(1000).to_sparse()
    assert bytes_of([sparse]) == 1000 * 4 + 2 * 1000 * 8


def test_what_can_not_be_shown_says_so_and_raises_nothing() -> None:
    class Broken(Shown):
        def _table(self) -> Table:
            raise AttributeError("half made")

    thing = Broken()
    for says in (repr(thing), str(thing), thing._repr_html_()):
        assert "Broken" in says
        assert "half made" in says
