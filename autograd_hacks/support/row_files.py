"""Rows on disk: a file that grows batch by batch, is complete after each, and can be resumed with the same batches."""

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
NOTES, SUFFIX = ".progress", ".npy"
"""The suffixes of the file of notes, and of files of rows in a folder."""


class RowFile:
    """Rows in ``path``, (rows, *shape), and notes in ``path.progress``: how many there are, and from which batches.

    origin: a digest of everything that the rows depend on; a file of another origin is not resumed. None to read only
    weights: a digest of the weights, empty for several checkpoints
    """

    def __init__(self, path: Path, origin: str | None, weights: str = "") -> None:
        self.path, self._notes = path, path.with_name(path.name + NOTES)
        self._at = 0, ""  # how many batches this call has seen, and their digest
        self.progress: dict[str, Any] = {"origin": origin, "weights": weights, "shape": None, "dtype": "", "ended": False}
        self.progress |= {"rows": 0, "batches": 0, "seen": ""}
        if path.suffix not in (".npy", ".safetensors"):
            raise ValueError(
                f"over: out={str(path)!r}; expected a file name that ends with .npy or .safetensors; or a folder, without "
                "an ending, for a dictionary of rows" + ON_DATA_SETS
            )
        if self.path.exists() != self._notes.exists():
            raise self._refused(f"and {self._notes}: only one of the two files exists, so over can't resume; delete it")
        try:
            if self._notes.exists():
                self.progress = {**json.loads(self._notes.read_text())}
            stored = self.progress["origin"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._notes} does not contain the notes of over ({error!r}); delete both files, and write the rows again"
                + ON_DATA_SETS
            ) from error
        if origin is not None and stored != origin:
            raise self._refused("holds rows of other weights or checkpoints; delete it, or give another name")
        if self.progress["rows"] and (size := self.path.stat().st_size) < _HEADER + self._size():
            raise self._refused(f"has {size} of the {_HEADER + self._size()} bytes written; delete it and its notes")

    @classmethod
    def written(cls, path: Path) -> "RowFile":
        """An existing file, for reading."""
        notes = path.with_name(path.name + NOTES)
        if missing := [part for part in (path, notes) if not part.exists()]:
            raise FileNotFoundError(
                f"there is no {missing[0]}; expected the rows that over(..., out={str(path)!r}) has written, and their "
                f"notes in {notes}" + ON_DATA_SETS
            )
        return cls(path, None)

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"{self.path} {why}" + ON_DATA_SETS)

    def wants(self, at: tuple[int, str]) -> bool:
        """Whether the rows of the next batch are needed: for a new batch, or for the file's last one, to compare them.

        at: how many batches there are with it, and their digest
        """
        self._at, (count, seen) = at, at
        if count == self.progress["batches"] and seen != self.progress["seen"]:
            raise self._refused(
                "holds rows of other batches, or of the same batches in another order. To resume, the loader must not "
                "shuffle: DataLoader(data, shuffle=False). Or delete the file and start again."
            )
        return bool(count >= self.progress["batches"])

    def take(self, rows: Tensor) -> None:
        """Writes, or compares, the rows of the batch that `wants` was called for."""
        if self._at[0] == self.progress["batches"]:
            self._check_last(rows)
        else:
            self._append(rows)

    def end(self) -> Tensor:
        """All rows, as `rows` returns them.  Call it after the last batch."""
        if self._at[0] < self.progress["batches"]:
            raise self._refused(
                f"holds rows of {self.progress['batches']} batches; the loader has {self._at[0]}. Delete the file"
            )
        if not self.progress.get("ended", False):
            self.progress["ended"] = True
            self._note()
        return self.rows()

    def _append(self, rows: Tensor) -> None:
        rows = rows.detach().cpu().contiguous()
        if rows.dtype not in _KINDS:
            raise TypeError(
                f"{self.path} can't hold {rows.dtype}; expected one of {', '.join(map(str, _KINDS))}. Return rows.float() "
                "from the verb" + ON_DATA_SETS
            )
        kind = {"shape": list(rows.shape[1:]), "dtype": str(rows.dtype)}
        if self.progress["shape"] is None:
            self.progress |= kind
        elif not kind.items() <= self.progress.items():
            raise self._refused(
                f"holds {self.progress['dtype']} rows of shape {tuple(self.progress['shape'])} from another verb; these are "
                f"{rows.dtype} of {tuple(rows.shape[1:])}. Delete it, or give another name"
            )
        end = _HEADER + self._size()
        count, seen = self._at
        self.progress |= {"rows": self.progress["rows"] + len(rows), "batches": count, "seen": seen, "ended": False}
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(end)  # remove an incomplete batch
            file.seek(end)
            file.write(rows.numpy().tobytes())
            file.seek(0)
            file.write(self._header())
        self._note()

    def _note(self) -> None:
        draft = self._notes.with_suffix(f"{NOTES}.draft")
        draft.write_text(json.dumps(self.progress))
        draft.replace(self._notes)

    def _check_last(self, rows: Tensor) -> None:
        """Raises ValueError if the file ends with other rows than these.

        rows: the rows of the file's last batch, computed again
        """
        all_rows = self.rows()
        if rows.shape[1:] == all_rows.shape[1:] and rows.dtype == all_rows.dtype and len(rows) <= len(all_rows):
            last, rows = all_rows[len(all_rows) - len(rows) :].double(), rows.detach().cpu().double()
            apart = (rows - last).nan_to_num().norm()
            if torch.equal(rows.isnan(), last.isnan()) and apart <= SAME * last.nan_to_num().norm():
                return
        raise self._refused(
            "holds other rows of the last batch than this call computes, from another verb or loss, or from a model with "
            "dropout, which needs model.eval(). Delete it, or give another name"
        )

    def _dtype(self) -> torch.dtype:
        return next(dtype for dtype in _KINDS if str(dtype) == self.progress["dtype"])

    def _size(self) -> int:
        """The size of the rows in bytes."""
        return int(self.progress["rows"]) * prod(self.progress["shape"]) * self._dtype().itemsize

    def _header(self) -> bytes:
        (numpy_kind, kind), shape = _KINDS[self._dtype()], [self.progress["rows"], *self.progress["shape"]]
        if self.path.suffix == ".npy":
            text = repr({"descr": numpy_kind, "fortran_order": False, "shape": tuple(shape)})
            return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11).encode() + b"\n"
        text = json.dumps({KEY: {"dtype": kind, "shape": shape, "data_offsets": [0, self._size()]}})
        return (_HEADER - 8).to_bytes(8, "little") + text.ljust(_HEADER - 8).encode()

    def rows(self) -> Tensor:
        """The rows, mapped from the file.  Writing to them doesn't change the file."""
        if self.progress["shape"] is None:
            return torch.zeros(0, device="cpu")
        shape = (self.progress["rows"], *self.progress["shape"])
        if not prod(shape):
            return torch.zeros(shape, dtype=self._dtype(), device="cpu")
        import numpy as np

        return torch.from_numpy(np.memmap(self.path, _KINDS[self._dtype()][0], "c", _HEADER, shape))


class RowFiles:
    """Rows of one or several names, all of the same batches: a file for the name '', or a folder with a file for each name.

    origin, weights: as in `RowFile`
    """

    def __init__(self, path: Path, origin: str, weights: str) -> None:
        self.path, self._given, self._is_one = path, (origin, weights), bool(path.suffix)
        if not self._is_one and path.is_file():
            raise ValueError(
                f"over: out={path} is a file, but verb returns rows of several names; expected a folder, without .npy"
                + ON_DATA_SETS
            )
        self.files = {name: RowFile(self._path(name), *self._given) for name in ([""] if self._is_one else names_in(path))}
        self._at, self._wanted = (0, ""), set[str]()

    def _path(self, name: str) -> Path:
        return self.path if self._is_one else self.path / f"{name}{SUFFIX}"

    def wants(self, batch: object) -> bool:
        """Whether any of the files needs the rows of the next batch, see `RowFile.wants`."""
        self._at = self._at[0] + 1, digest_of(batch, before=self._at[1])
        self._wanted = {name for name, file in self.files.items() if file.wants(self._at)}
        return bool(self._wanted) or not self.files

    def take(self, rows: Mapping[str, Tensor]) -> None:
        """Writes, or compares, the rows of the batch that `wants` was called for, by name."""
        if (rows.keys() == {""}) is not self._is_one:
            raise ValueError(
                f"over was given out={str(self.path)!r}, but verb returned "
                f"{'a dictionary' if self._is_one else 'one tensor'}. Give a file, out='rows.npy', for one tensor of N "
                "rows; or a folder, out='rows', for a dictionary" + ON_DATA_SETS
            )
        odd = [name for name in rows if not name or "/" in name or os.sep in name or name.startswith(".")]
        if odd and not self._is_one:
            raise ValueError(
                f"over: verb returned rows named {odd[0]!r}, which can't be the name of a file in {self.path}" + ON_DATA_SETS
            )
        if not (self.files.keys() <= rows.keys() if self._at[0] == 1 else self.files.keys() == rows.keys()):
            raise ValueError(
                f"{self.path} holds rows named {sorted(self.files)} from another verb; this verb returned {sorted(rows)}. "
                "Delete the folder, or give another name" + ON_DATA_SETS
            )
        if not self._is_one:
            self.path.mkdir(parents=True, exist_ok=True)
        for name in rows.keys() - self.files.keys():
            self.files[name] = RowFile(self._path(name), *self._given)
            if self.files[name].wants(self._at):
                self._wanted.add(name)
        self.files = {name: self.files[name] for name in rows}  # in the verb's order
        for name in rows:
            if name in self._wanted:
                self.files[name].take(rows[name])

    def end(self) -> dict[str, Tensor]:
        """All rows by name, after the last batch."""
        return {name: file.end() for name, file in self.files.items()}


def by_file(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Rows by the names of their files: one for each field of a named tuple."""
    found: dict[str, Any] = {}
    for name, x in rows.items():
        found |= {f"{name}.{field}": part for field, part in x._asdict().items()} if hasattr(x, "_asdict") else {name: x}
    return found


def names_in(folder: Path) -> list[str]:
    """The names of a folder's rows."""
    ends = f"{SUFFIX}{NOTES}"
    return sorted(notes.name.removesuffix(ends) for notes in folder.glob(f"*{ends}")) if folder.is_dir() else []


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
            yield x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
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
