"""Rows on disk: a file that grows batch by batch, is complete after each, and can be resumed with the same batches."""

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.errors import ON_DATA_SETS
from autograd_hacks.support.trees import slots_of

_KINDS = {
    torch.float16: ("<f2", "F16"),
    torch.float32: ("<f4", "F32"),
    torch.float64: ("<f8", "F64"),
    torch.int64: ("<i8", "I64"),
    torch.bool: ("|b1", "BOOL"),
}
"""{dtype of rows: its name in ``.npy`` and in ``.safetensors``}"""
_HEADER = 512
"""Bytes before the rows, reserved so that the header can be rewritten."""
SAME = 1e-3
"""The largest difference of one batch's rows on another day or machine, relative to their length."""
KEY = "rows"
"""The tensor's name in a ``.safetensors`` file."""
NOTES = ".progress"
"""The suffix of the file of notes."""


class RowFiles:
    """Rows in a file ``path``, (rows, *shape), by the name ''; or in a folder with a file for each name.  Notes, in
    ``path.progress`` or in ``.progress`` in the folder, say how many rows are complete, and from which batches.

    origin: a digest of everything that the rows depend on; files of another origin are not resumed. None to read only
    weights: a digest of the weights
    """

    def __init__(self, path: Path, origin: str | None = None, weights: str = "") -> None:
        self.path, self.is_one = path, bool(path.suffix)
        self._notes = path.with_name(path.name + NOTES) if self.is_one else path / NOTES
        self._at = 0, ""  # how many batches this call has seen, and their digest
        self.notes: dict[str, Any] = {"origin": origin, "weights": weights, "kinds": {}, "rows": 0, "batches": 0, "seen": ""}
        self.notes["ended"] = False
        if path.suffix not in ("", ".npy", ".safetensors"):
            raise ValueError(
                f"over: out={str(path)!r}; expected a file name that ends with .npy or .safetensors; or a folder, without "
                "an ending, for a dictionary of rows" + ON_DATA_SETS
            )
        if not self.is_one and path.is_file():
            raise ValueError(
                f"over: out={path} is a file, but verb returns rows of several names; expected a folder, without .npy"
                + ON_DATA_SETS
            )
        if origin is None and (missing := [part for part in (path, self._notes) if not part.exists()]):
            raise FileNotFoundError(
                f"there is no {missing[0]}; expected the rows that over(..., out={str(path)!r}) has written, and their "
                f"notes in {self._notes}" + ON_DATA_SETS
            )
        try:
            if self._notes.exists():
                stored = json.loads(self._notes.read_text())
                self.notes = {key: stored[key] for key in self.notes}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._notes} does not contain the notes of over ({error!r}); delete it and the rows, and write them again"
                + ON_DATA_SETS
            ) from error
        if origin is not None and self.notes["origin"] != origin:
            raise self._refused("holds rows of other weights; delete it, or give another name")
        for name in self.notes["kinds"] if self.notes["rows"] else ():
            file, expected = self._path(name), self._end(name)
            if (size := file.stat().st_size if file.exists() else 0) < expected:
                raise self._refused(f"has {size} of the {expected} bytes written in {file}; delete it and {self._notes}")

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"{self.path} {why}" + ON_DATA_SETS)

    def _path(self, name: str) -> Path:
        return self.path if self.is_one else self.path / f"{name}.npy"

    def wants(self, batch: object) -> bool:
        """Whether the rows of the next batch are needed: for a new batch, or for the files' last one, to compare them."""
        count, seen = self._at = self._at[0] + 1, digest_of(batch, before=self._at[1])
        if count == self.notes["batches"] and seen != self.notes["seen"]:
            raise self._refused(
                "holds rows of other batches, or of the same batches in another order. To resume, the loader must not "
                "shuffle: DataLoader(data, shuffle=False). Or delete the file and start again."
            )
        return bool(count >= self.notes["batches"])

    def take(self, rows: Mapping[str, Tensor]) -> None:
        """Writes, or compares, the rows of the batch that `wants` was called for, by name."""
        self._check(rows)
        kinds = {name: [str(x.dtype).removeprefix("torch."), list(x.shape[1:])] for name, x in rows.items()}
        if not self._notes.exists():
            if old := [path for name in rows if (path := self._path(name)).exists()]:
                raise self._refused(
                    f"can't be resumed, without {self._notes}: only one of the two files exists; delete {old[0]}"
                )
            if not self.is_one:
                self.path.mkdir(parents=True, exist_ok=True)
            self._note(kinds=kinds)
        if kinds != self.notes["kinds"]:
            raise self._refused(
                f"holds {_described(self.notes['kinds'])} from another verb; this verb returned {_described(kinds)}. "
                "Delete it, or give another name"
            )
        count, seen = self._at
        if count == self.notes["batches"]:
            self._check_last(rows)
            return
        for name, x in rows.items():
            self._append(name, x.detach().cpu().contiguous())
        total = self.notes["rows"] + len(next(iter(rows.values())))
        self._note(rows=total, batches=count, seen=seen, ended=False)

    def end(self) -> dict[str, Tensor]:
        """All rows, as `rows` returns them.  Call it after the last batch."""
        if self._at[0] < self.notes["batches"]:
            raise self._refused(
                f"holds rows of {self.notes['batches']} batches; the loader has {self._at[0]}. Delete the file"
            )
        if not self.notes["ended"]:
            self._note(ended=True)
        return self.rows()

    def _check(self, rows: Mapping[str, Tensor]) -> None:
        """Raises for rows that no file can hold."""
        if (rows.keys() == {""}) is not self.is_one:
            raise ValueError(
                f"over was given out={str(self.path)!r}, but verb returned "
                f"{'a dictionary' if self.is_one else 'one tensor'}. Give a file, out='rows.npy', for one tensor of N "
                "rows; or a folder, out='rows', for a dictionary" + ON_DATA_SETS
            )
        odd = [name for name in rows if not name or "/" in name or os.sep in name or name.startswith(".")]
        if odd and not self.is_one:
            raise ValueError(
                f"over: verb returned rows named {odd[0]!r}, which can't be the name of a file in {self.path}" + ON_DATA_SETS
            )
        if wrong := [x.dtype for x in rows.values() if x.dtype not in _KINDS]:
            raise TypeError(
                f"{self.path} can't hold {wrong[0]}; expected one of {', '.join(map(str, _KINDS))}. Return rows.float() "
                "from the verb" + ON_DATA_SETS
            )

    def _note(self, **changed: object) -> None:
        self.notes |= changed
        draft = self._notes.with_suffix(f"{NOTES}.draft")
        draft.write_text(json.dumps(self.notes))
        draft.replace(self._notes)

    def _check_last(self, rows: Mapping[str, Tensor]) -> None:
        """Raises ValueError if the files end with other rows than these, the last batch's, computed again."""
        for name, written in self.rows().items():
            now, last = rows[name].detach().cpu().double(), written[max(0, len(written) - len(rows[name])) :].double()
            is_same = now.shape == last.shape and torch.equal(now.isnan(), last.isnan())
            if not is_same or (now - last).nan_to_num().norm() > SAME * last.nan_to_num().norm():
                raise self._refused(
                    "holds other rows of the last batch than this call computes, from another verb or loss, or from a model "
                    "with dropout, which needs model.eval(). Delete it, or give another name"
                )

    def _kind(self, name: str) -> tuple[torch.dtype, list[int]]:
        """The dtype of rows, and their number and shape."""
        dtype, shape = self.notes["kinds"][name]
        return getattr(torch, dtype), [self.notes["rows"], *shape]

    def _end(self, name: str) -> int:
        """The size of a file's header and complete rows in bytes."""
        dtype, shape = self._kind(name)
        return _HEADER + prod(shape) * dtype.itemsize

    def _append(self, name: str, rows: Tensor) -> None:
        (dtype, (count, *shape)), path, end = self._kind(name), self._path(name), self._end(name)
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(end)  # remove an incomplete batch
            file.seek(end)
            file.write(_bytes(rows))
            file.seek(0)
            file.write(_header(path.suffix, dtype, [count + len(rows), *shape]))

    def rows(self) -> dict[str, Tensor]:
        """All rows by name, mapped from their files.  Writing to them doesn't change the files."""
        return {name: self._mapped(name, *self._kind(name)) for name in self.notes["kinds"]}

    def _mapped(self, name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
        if not prod(shape):  # nothing can't be mapped
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return torch.from_file(
            str(self._path(name)), shared=False, size=self._end(name), dtype=torch.uint8
        )[_HEADER:].view(dtype).view(shape)  # fmt: skip


def _bytes(x: Tensor) -> bytes:
    """The memory of a contiguous tensor of the CPU.  Without NumPy, which PyTorch doesn't need."""
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""


def _header(suffix: str, dtype: torch.dtype, shape: list[int]) -> bytes:
    numpy_kind, kind = _KINDS[dtype]
    if suffix == ".npy":
        text = repr({"descr": numpy_kind, "fortran_order": False, "shape": tuple(shape)})
        return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11).encode() + b"\n"
    text = json.dumps({KEY: {"dtype": kind, "shape": shape, "data_offsets": [0, prod(shape) * dtype.itemsize]}})
    return (_HEADER - 8).to_bytes(8, "little") + text.ljust(_HEADER - 8).encode()


def _described(kinds: Mapping[str, Any]) -> str:
    each = [
        f"{dtype} rows of shape {tuple(shape)}{f' for {name!r}' if name else ''}" for name, (dtype, shape) in kinds.items()
    ]
    return ", ".join(each[:5]) + (f" and {len(each) - 5} more" if len(each) > 5 else "")


# Digests of batches and weights, equal in all processes.

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def digest_of(*things: object, before: str = "") -> str:
    """A digest of nested tensors, arrays, numbers, text, and objects that hold them.

    before: an earlier digest to continue from
    """
    digest = hashlib.sha256(before.encode())
    for piece in _pieces(things, []):
        digest.update(f"{len(piece)} ".encode())  # otherwise "1", "12" would equal "11", "2"
        digest.update(piece)
    return digest.hexdigest()


def _pieces(thing: Any, around: list[object]) -> Iterator[bytes]:
    """The bytes of an object's parts.

    around: the objects that contain it, from the outside in
    """
    if isinstance(thing, _PLAIN):
        yield repr(thing).encode()
        return
    depth = next((n for n, outer in enumerate(around) if outer is thing), None)
    if depth is not None:  # a cycle, such as a batch that refers to its data set
        yield f"again {depth}".encode()
        return
    yield type(thing).__qualname__.encode()
    parts: Any = ()
    if isinstance(thing, Tensor):
        x = thing.detach()
        if x.is_nested:
            parts = x.unbind()
        elif x.is_sparse:
            parts = x.shape, x._indices(), x._values()
        else:
            x = (x if x.layout == torch.strided else x.to_dense()).resolve_conj().resolve_neg().cpu().contiguous()
            yield repr((tuple(x.shape), x.dtype)).encode()
            yield _bytes(x)
    elif isinstance(thing, Mapping):
        parts = [list(thing), *thing.values()]
    elif isinstance(thing, list | tuple):
        yield str(len(thing)).encode()
        parts = thing
    elif callable(getattr(thing, "tobytes", None)):  # an array, an image
        kind = str(getattr(thing, "dtype", None))
        yield repr([getattr(thing, name, None) for name in ("shape", "size", "mode")] + [kind]).encode()
        if kind == "object":  # its bytes are addresses
            parts = thing.tolist()
        else:
            yield thing.tobytes()
    elif attributes := slots_of(thing) | getattr(thing, "__dict__", {}):
        parts = [attributes]
    else:
        yield _ADDRESS.sub("", repr(thing)).encode()
    for part in parts:
        yield from _pieces(part, [*around, thing])
