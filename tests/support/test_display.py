"""Tables: their text and their HTML say the same."""

import re
from html import unescape

import pytest
import torch

from autograd_hacks.support.display import Shown, Table, bytes_of, with_unit

HEADER = ("parameter", "bytes")


def cells_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_text_and_html_have_the_same_rows() -> None:
    table = Table("a model & more", (HEADER, ("<weight>", "12 B"), ("bias", "4 B")), "a note\nof two lines")
    lines = table.text().split("\n")
    assert lines[:3] == ["a model & more", "parameter  bytes", "---------  -----"]
    assert lines[3:] == ["<weight>   12 B", "bias       4 B", "a note", "of two lines"]
    html = table.html()
    assert cells_of(html) == [list(HEADER), ["<weight>", "12 B"], ["bias", "4 B"]]
    assert "a model &amp; more" in html
    assert "a note<br>of two lines" in html


def test_a_long_table_is_shortened_in_the_middle() -> None:
    rows = [(f"layers.{k}.weight", f"{k} B") for k in range(1000)]
    for table in (Table("many", (HEADER, *rows)), Table("many", (HEADER, *rows[:26]))):
        text = table.text().split("\n")
        assert len(text) == 3 + 24 + 1
        assert text[3].startswith("layers.0.weight")
        assert text[-1].startswith(table.rows[-1][0])
        assert text[3 + 12] == f"... {len(table.rows) - 25} more"
        assert len(cells_of(table.html())) == 26
    assert "more" not in Table("few", (HEADER, *rows[:25])).text()
    assert "more" not in Table("whole", (HEADER, *rows), is_whole=True).text()


def test_a_table_without_rows_is_a_line() -> None:
    assert Table("nothing yet").text() == "nothing yet"
    assert "<table" not in Table("nothing yet").html()


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
