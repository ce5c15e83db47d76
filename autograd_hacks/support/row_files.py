"""Rows on disk: a file that grows batch by batch, is whole after each, and can be gone on with."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.errors import ON_DATA_SETS
from autograd_hacks.support.digest import digest_of

_KINDS = {
    torch.float16: ("<f2", "F16"),
    torch.float32: ("<f4", "F32"),
    torch.float64: ("<f8", "F64"),
    torch.int64: ("<i8", "I64"),
    torch.bool: ("|b1", "BOOL"),
}
"""What rows may be, as ``.npy`` and ``.safetensors`` call it."""
_HEADER = 512
"""Bytes in front of the rows, so that the header can be written anew."""
SAME = 1e-3
"""How far the rows of one batch may be from themselves, on another day or machine, for their length."""
KEY = "rows"
"""The tensor's name in a ``.safetensors`` file."""


class RowFile:
    """Rows in ``path``, (rows, *shape), and beside it ``path.progress``: how many there are, from which batches.

    origin: what they are made of, the weights say; a file of another origin is not gone on with
    """

    def __init__(self, path: str | os.PathLike[str], origin: str) -> None:
        self.path, self._notes = Path(path), Path(f"{os.fspath(path)}.progress")
        self._batches, self._seen = 0, ""  # by this call
        if self.path.suffix not in (".npy", ".safetensors"):
            raise ValueError(
                f"out is {str(path)!r}; expected a file name that ends with .npy or .safetensors" + ON_DATA_SETS
            )
        if self.path.exists() != self._notes.exists():
            raise ValueError(
                f"of {self.path} and {self._notes} there is but one, so that it can't be gone on with; delete it"
                + ON_DATA_SETS
            )
        fresh = {"origin": origin, "batches": 0, "seen": "", "rows": 0, "shape": None, "dtype": ""}
        try:
            self.known: dict[str, Any] = json.loads(self._notes.read_text()) if self._notes.exists() else fresh
        except ValueError as error:
            raise ValueError(f"{self._notes} is no JSON any more ({error}); delete both files" + ON_DATA_SETS) from error
        if self.known["origin"] != origin:
            raise ValueError(
                f"{self.path} holds rows of other weights, or of other checkpoints; delete it, or name another"
                + ON_DATA_SETS
            )
        if self.known["rows"] and self.path.stat().st_size < _HEADER + self._size():
            raise ValueError(
                f"{self.path} has {self.path.stat().st_size} bytes, of {_HEADER + self._size()} that were written; delete "
                "it and its notes" + ON_DATA_SETS
            )

    def wants(self, batch: object) -> bool:
        """Whether the rows of one more batch are asked for: of a new one, or of the last in the file, to be compared."""
        self._batches, self._seen, known = self._batches + 1, digest_of(batch, before=self._seen), self.known
        if self._batches == known["batches"] and self._seen != known["seen"]:
            raise ValueError(
                f"{self.path} holds rows of other batches, or of these in another order. A loader that is gone on with must "
                "not shuffle: DataLoader(data, shuffle=False). Or delete the file to begin anew." + ON_DATA_SETS
            )
        return bool(self._batches >= known["batches"])

    def take(self, rows: Tensor) -> None:
        """The rows of the batch that `wants` was told of."""
        if self._batches == self.known["batches"]:
            self._check_last(rows)
        else:
            self._append(rows)

    def end(self) -> Tensor:
        """All rows, as `rows` has them, after the last batch."""
        if self._batches < self.known["batches"]:
            raise ValueError(
                f"{self.path} holds rows of {self.known['batches']} batches; the loader has {self._batches}. Delete the file"
                + ON_DATA_SETS
            )
        return self.rows()

    def _append(self, rows: Tensor) -> None:
        rows = rows.detach().cpu().contiguous()
        if rows.dtype not in _KINDS:
            raise TypeError(
                f"{self.path} is to hold {rows.dtype}; expected one of {', '.join(map(str, _KINDS))}. Let the verb return "
                "rows.float()" + ON_DATA_SETS
            )
        shape, dtype, known = list(rows.shape[1:]), str(rows.dtype), self.known
        if known["shape"] is None:
            known |= {"shape": shape, "dtype": dtype}
        if [shape, dtype] != [known["shape"], known["dtype"]]:
            raise ValueError(
                f"{self.path} holds {known['dtype']} rows of shape {tuple(known['shape'])}, and these are {dtype} of "
                f"{tuple(shape)}: another verb's; delete it, or name another" + ON_DATA_SETS
            )
        before = known["rows"] * prod(shape) * rows.element_size()
        self.known = known | {"rows": known["rows"] + len(rows), "batches": self._batches, "seen": self._seen}
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(_HEADER + before)  # of a batch that was not written to its end
            file.seek(_HEADER + before)
            file.write(rows.numpy().tobytes())
            file.seek(0)
            file.write(self._header())
        draft = self._notes.with_name(self._notes.name + ".draft")
        draft.write_text(json.dumps(self.known))
        draft.replace(self._notes)

    def _check_last(self, rows: Tensor) -> None:
        """Raises ValueError where the file ends with other rows than these.  rows: those of the last batch, taken anew"""
        shape = [self.known["rows"], *self.known["shape"]]
        if list(rows.shape[1:]) == shape[1:] and str(rows.dtype) == self.known["dtype"] and len(rows) <= shape[0]:
            last, rows = self.rows()[shape[0] - len(rows) :].double(), rows.detach().cpu().double()
            apart = (rows - last).nan_to_num().norm()
            if torch.equal(rows.isnan(), last.isnan()) and apart <= SAME * last.nan_to_num().norm():
                return
        raise ValueError(
            f"{self.path} holds other rows of the last batch in it than this call makes: by another verb or loss, or by a "
            "model with dropout, which says something else each time: model.eval(). Delete it, or name another"
            + ON_DATA_SETS
        )

    def _size(self) -> int:
        """Of the rows, in bytes."""
        return int(self.known["rows"]) * prod(self.known["shape"]) * self._dtype().itemsize

    def _dtype(self) -> torch.dtype:
        return next(dtype for dtype in _KINDS if str(dtype) == self.known["dtype"])

    def _header(self) -> bytes:
        (numpy_kind, kind), shape = _KINDS[self._dtype()], [self.known["rows"], *self.known["shape"]]
        if self.path.suffix == ".npy":
            described = repr({"descr": numpy_kind, "fortran_order": False, "shape": tuple(shape)})
            return (
                b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + described.ljust(_HEADER - 11).encode() + b"\n"
            )
        described = json.dumps({KEY: {"dtype": kind, "shape": shape, "data_offsets": [0, self._size()]}})
        return (_HEADER - 8).to_bytes(8, "little") + described.ljust(_HEADER - 8).encode()

    def rows(self) -> Tensor:
        """The rows, read from the file as they are used; what is written to them stays in memory."""
        if self.known["shape"] is None:
            return torch.zeros(0, device="cpu")
        import numpy as np

        shape = (self.known["rows"], *self.known["shape"])
        if not prod(shape):
            return torch.zeros(shape, dtype=self._dtype(), device="cpu")
        return torch.from_numpy(np.memmap(self.path, _KINDS[self._dtype()][0], "c", _HEADER, shape))
