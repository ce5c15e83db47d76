"""Stores of rows: what is found equals what all rows say, and what doesn't belong together is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import cross_entropies, joined, of_classes
from refused import check_each
from steps import rows_of
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import PerSampleGrads, over
from autograd_hacks.attribution import Store, trak_scores
from autograd_hacks.support.row_files import RowFiles

Batches = list[tuple[Tensor, Tensor]]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return of_classes(model, *batch)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    autograd_hacks.add_hooks(model)
    return model


def batches(*sizes: int) -> Batches:
    return [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]


def all_rows(model: nn.Module, data: Batches) -> Tensor:
    """Each sample's whole gradient, by a backward pass of its own, (D, P)."""
    return torch.cat([joined(rows_of(model, x, y, cross_entropies)) for x, y in data])


def written(path: Path, rows: Tensor) -> Store:
    """A store of given rows, three at a time."""
    model = nn.Linear(2, 1).double()
    autograd_hacks.add_hooks(model)
    pieces, taken = list(rows.split(3)), iter(rows.split(3))
    data = [(torch.randn(len(piece), 2, dtype=torch.float64), None) for piece in pieces]
    over(model, data, lambda model, batch: model(batch[0])[:, 0], lambda grads: next(taken), out=path)
    return Store(path)


VERBS: dict[str, Callable[[PerSampleGrads], Any]] = {
    "rows.npy": lambda grads: joined(grads.dense()),
    "rows.safetensors": lambda grads: joined(grads.dense()),
    "rows": PerSampleGrads.dense,
}


@pytest.mark.parametrize("max_bytes", [1, 2**26])
@pytest.mark.parametrize("kind", VERBS)
def test_what_is_found_is_what_all_rows_say(kind: str, max_bytes: int, tmp_path: Path) -> None:
    model, data, others = net(), batches(4, 4, 3), batches(3)
    over(model, data, loss, VERBS[kind], out=tmp_path / kind)
    loss(model, others[0]).sum().backward()
    queries = VERBS[kind](autograd_hacks.per_sample_grads(model, loss_type="sum"))
    store, rows, asked = Store(tmp_path / kind), all_rows(model, data), all_rows(model, others)
    assert len(store) == 11
    for cosine, products in [(False, asked @ rows.T), (True, F.normalize(asked, dim=1) @ F.normalize(rows, dim=1).T)]:
        values, numbers = store.search(queries, 4, cosine=cosine, model=model, max_bytes=max_bytes)
        assert_close(values, products.topk(4).values)
        assert_close(products.gather(1, numbers), values)


@pytest.mark.parametrize("max_bytes", [1, 2**26])
def test_duplicates_are_all_pairs_above_the_threshold(max_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = torch.randn(8, 5)
    rows[6], rows[3], rows[4] = 2 * rows[1], rows[0] + 0.01 * torch.randn(5), 0
    store = written(tmp_path / "rows.npy", rows)
    cosines, pairs = store.duplicates(0.99, max_bytes=max_bytes)
    assert pairs.tolist() == [[1, 6], [0, 3]]
    assert_close(cosines, torch.cosine_similarity(rows[pairs[:, 0]], rows[pairs[:, 1]]))
    assert store.duplicates(1)[1].tolist() == [[1, 6]]
    expected = [[i, j] for i in range(8) for j in range(i + 1, 8) if torch.cosine_similarity(rows[i], rows[j], 0) >= 0.2]
    assert sorted(store.duplicates(0.2)[1].tolist()) == expected
    with pytest.raises(ValueError, match="more than 1 pairs"):
        store.duplicates(0.2, max_pairs=1)


def test_rows_that_are_not_finite_are_left_out_and_named(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, 0], [torch.nan, 1], [2, 0], [0, 0], [torch.inf, 0]])
    store, queries = written(tmp_path / "rows.npy", rows), torch.tensor([[1.0, 0], [0, 0]])
    with pytest.warns(RuntimeWarning, match=r"2 rows .* were left out, the first of them \[1, 4\]"):
        values, numbers = store.search(queries, 5)
    assert numbers.tolist()[0] == [2, 0, 3, -1, -1]
    assert values[0].tolist() == [2, 1, 0, -torch.inf, -torch.inf]
    with pytest.warns(RuntimeWarning):
        values, numbers = store.search(queries, 3, cosine=True)
    assert values.tolist() == [[1, 1, 0], [0, 0, 0]]
    with pytest.warns(RuntimeWarning):
        assert store.duplicates()[1].tolist() == [[0, 2]]


def test_half_precision_is_added_up_in_single_and_overflow_is_said(tmp_path: Path) -> None:
    rows = torch.full((2, 100), 30.0).half()
    values, _ = written(tmp_path / "half.npy", rows).search(rows[:1], 1)
    assert values.item() == 90000  # above float16's 65504
    large = torch.full((2, 2), 1e30)
    with pytest.raises(ValueError, match=r"overflow in torch\.float32"):
        written(tmp_path / "large.npy", large).search(large, 1)


def test_a_store_of_other_weights_is_refused(tmp_path: Path) -> None:
    model, data, path = net(), batches(4), tmp_path / "rows.npy"
    over(model, data, loss, lambda grads: grads.project(8), out=path)
    store = Store(path)
    store.check(model)
    store.check(net())  # of the same weights
    check_each(
        (ValueError, r"rows\.npy has rows of other weights than this Sequential", lambda: store.check(net(1))),
        (ValueError, "other weights", lambda: store.search(store.rows, 1, model=net(1))),
    )


def test_queries_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = torch.randn(4, 3)
    store = written(tmp_path / "rows.npy", rows)
    check_each(
        *[(error, words, lambda queries=queries: store.search(queries, 1))
          for queries, error, words in [
             (rows.double(), TypeError, r"torch\.float64 tensor .* expected torch\.float32"),
             (rows[:, :2], ValueError, r"shape \(4, 2\); the rows of .* expect \(Q, 3\)"),
             (rows[0], ValueError, r"shape \(3,\)"),
             (rows / 0, ValueError, r"queries with NaN or ∞, the first of them \[0, 1, 2, 3\]"),
             ({"a": rows}, ValueError, "named 'a'; .* expects one tensor"),
             (None, TypeError, "NoneType")]],
        (ValueError, r"k=5; expected at most the 4 rows", lambda: store.search(rows, 5)),
        (ValueError, "k=0", lambda: store.search(rows, 0)),
        (ValueError, r"threshold=1\.5", lambda: store.duplicates(1.5)),
        (ValueError, r"trak_scores was given shapes .*\(4, 3\).*K ≤ D", lambda: trak_scores([rows], [rows], [rows])),
        (ValueError, "trak_scores", lambda: trak_scores([rows.mT], [rows.mT], [rows[:3, 0]])),
    )  # fmt: skip


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    over(net(), batches(2), loss, PerSampleGrads.norms, out=tmp_path / "norms.npy")
    (tmp_path / "rows.npy").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    check_each(
        (FileNotFoundError, r"there is no .*none\.npy", lambda: Store(tmp_path / "none.npy")),
        (FileNotFoundError, r"there is no .*\.progress; expected the rows that over", lambda: Store(tmp_path / "empty")),
        (FileNotFoundError, r"rows\.npy\.progress", lambda: Store(tmp_path / "rows.npy")),
        (ValueError, "expected rows of floating-point numbers", lambda: Store(tmp_path / "norms.npy")),
    )


# Folders.


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("files", [0, 1, 3])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_folder_is_gone_on_with(batch: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in one of its batches, after some of the files were written."""
    model, data, path = net(), batches(2, 3, 2), tmp_path / "rows"
    append, count = RowFiles._append, 0

    def interrupted(self: RowFiles, name: str, rows: Tensor) -> None:
        nonlocal count
        if count == 4 * batch + files:
            raise Interrupted
        count += 1
        append(self, name, rows)

    monkeypatch.setattr(RowFiles, "_append", interrupted)
    with pytest.raises(Interrupted):
        over(model, data, loss, PerSampleGrads.dense, out=path)
    monkeypatch.setattr(RowFiles, "_append", append)
    with pytest.warns(RuntimeWarning, match="has 2 rows") if batch else pytest.raises(ValueError, match="to its end"):
        Store(path)
    found = over(model, data, loss, PerSampleGrads.dense, out=path)
    assert_close(joined(found), all_rows(model, data))
    assert_close(Store(path).rows, found)


def test_folders_and_files_are_not_taken_for_each_other(tmp_path: Path) -> None:
    model, data = net(), batches(2)

    def run(verb: Callable[[PerSampleGrads], Any], out: str, model: nn.Module = model) -> Any:
        return over(model, data, loss, verb, out=tmp_path / out)

    run(PerSampleGrads.dense, "folder")
    check_each(
        (ValueError, r"returned one tensor\. Give a file", lambda: run(lambda grads: grads.project(4), "rows")),
        (ValueError, r"returned a dictionary\. Give a file", lambda: run(PerSampleGrads.dense, "rows.npy")),
        (ValueError, "another verb; this verb .* for 'a'. Delete it",
         lambda: run(lambda grads: {"a": grads.project(4)}, "folder")),
        (ValueError, r"'a/b', which can't be the name of a file",
         lambda: run(lambda grads: {"a/b": grads.project(4)}, "other")),
        (ValueError, "other weights", lambda: run(PerSampleGrads.dense, "folder", net(1))),
        (ValueError, r"expects {name: tensor} for '0\.weight'",
         lambda: Store(tmp_path / "folder").search(torch.randn(2, 4), 1)),
    )  # fmt: skip
