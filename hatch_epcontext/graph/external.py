"""The files of a model's external data: where they are, and whether the model can use them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

import onnx

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.files import (
    MAX_BYTES,
    Rejection,
    is_inside,
    is_lfs_pointer,
    is_missing,
    too_large,
    unreadable,
)
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.graph.reading import byte_size
from hatch_epcontext.text import show_size

_ADDRESS = "_ORT_MEM_ADDR_"
"""ONNX Runtime treats the offset of a location with this prefix as an address in its own memory."""


def external_data(model: onnx.ModelProto, path: Path, location: str = "") -> tuple[str, ...]:
    """Return the files of the external data of ``model``, whose file is ``path``.

    They are relative to its folder, with forward slashes, sorted. ``location`` is that of problems. Raises
    ModelError when a tensor does not name the file of its data, and when a file is outside the folder (see
    `stays_inside`), is missing, is no regular file, is too short, or is larger than a model can need. No file
    is read.
    """
    problems: list[Problem] = []
    total = 0

    def add(message: str, hint: str | None = None) -> None:
        problems.append(Problem(Kind.EXTERNAL_DATA, location, message, hint))

    try:
        ends, inside = _ends(model), _ModelFolder(path)
    except ModelError as error:
        raise error.located(location) from None
    for name, end in sorted(ends.items()):
        status = inside.status(name)
        if PurePosixPath(name).name == "manifest.json":
            message = f"the external data {name!r} has the name of a model package's manifest."
            add(message, "Save the model and its data again, with another name.")
        elif isinstance(status, Rejection):
            add(f"the external data {name!r} {status.message}", status.hint)
        elif status.st_size < end:
            message = f"the external data {name!r} is shorter than the model requires."
            add(message, "Save the model and its data again.")
        elif reason := too_large(status, end):
            add(f"the external data {name!r} {reason}.")
        else:
            total += status.st_size
    if total > MAX_BYTES:
        add(f"the external data is larger than {show_size(MAX_BYTES)}: {show_size(total)}.")
    ModelError.check(problems)
    return tuple(PurePosixPath(name).as_posix() for name in sorted(ends))


def load_whole(path: Path) -> onnx.ModelProto:
    """Read the model at ``path`` with its external data, whose files `external_data` has accepted.

    onnx itself rejects files with several hard links, as caches and workers make them instead of copies.
    """
    model = onnx.load(path, load_external_data=False)
    read_data(model, path.parent)
    return model


def read_data(model: onnx.ModelProto, folder: Path) -> None:
    """Put the external data of ``model``, which is in ``folder``, into it. Files are as for `load_whole`."""
    for tensor in _external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        with (folder / entries["location"]).open("rb") as file:
            file.seek(_bytes(tensor, "offset", entries))
            tensor.raw_data = file.read(byte_size(tensor))
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def save_whole(model: onnx.ModelProto, path: Path, *, apart: bool = False) -> tuple[str, ...]:
    """Write ``model``, which has all its values in it, to ``path``, and return the names of the files.

    Large tensors are in a file of their own with ``apart``, and if one file cannot have them.
    """
    if not apart and model.ByteSize() <= PROTOBUF_LIMIT:
        onnx.save(model, path)
        return (path.name,)
    data = path.with_name(f"{path.name}.data")
    onnx.save(model, path, save_as_external_data=True, location=data.name)
    # Small tensors stay in the model.
    return (path.name, data.name) if data.exists() else (path.name,)


def stays_inside(path: Path, location: str) -> bool:
    """Whether a file that the model at ``path`` names is in its folder: on any system, links resolved.

    If ``path`` is a link, the folder that it leads to counts too, as for ONNX Runtime: in the cache of the
    Hugging Face Hub all files of a model are links into one folder.
    """
    return _ModelFolder(path).has(location)


def in_and_outside(model: onnx.ModelProto, path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of the external data of ``model`` in its folder, and the others; see `stays_inside`.

    They are sorted, and may be missing. Raises ModelError, without a location, when a tensor does not name
    the file of its data, or when a file in the folder is larger than the model at ``path`` needs.
    """
    folder = _ModelFolder(path)
    ends = dict(sorted(_ends(model).items()))
    inside = tuple(filter(folder.has, ends))
    for name in inside:
        status = folder.status(name)
        if not isinstance(status, Rejection) and (reason := too_large(status, ends[name])):
            message = f"the external data {name!r} {reason}."
            raise ModelError(Problem(Kind.EXTERNAL_DATA, "", message))
    return inside, tuple(sorted(ends.keys() - set(inside)))


_OUTSIDE = Rejection("is outside the model's folder.", "Save the model with relative locations.")
_MISSING = Rejection(
    "is missing.",
    "It belongs beside the model, in the sdist too. With a url: remove data, and run epcontext fetch --pin.",
)
_LFS_POINTER = Rejection(
    "is a Git LFS pointer, not the data itself.", "Fetch the data with Git LFS."
)

_MAX_OF_A_POINTER = 1024
"""The specification's upper limit in bytes of a Git LFS pointer."""


class _ModelFolder:
    """The folder of the model at ``path``, resolved once for all its files; see `stays_inside`."""

    def __init__(self, path: Path) -> None:
        self._path, self._folder = path, path.parent

    @cached_property
    def _resolved(self) -> tuple[Path, Path]:
        return self._folder.resolve(), self._path.resolve().parent

    def has(self, location: str) -> bool:
        """Whether ``location`` is in the folder: on any system, links resolved."""
        if "\0" in location or _ADDRESS in location or not is_inside(location):
            return False
        try:
            resolved = (self._folder / location).resolve()
            return any(map(resolved.is_relative_to, self._resolved))
        except RuntimeError:
            # A loop of links. Python 3.13 and newer raise nothing.
            return True
        except OSError:
            # A name that no file system allows.
            return False

    def status(self, location: str) -> os.stat_result | Rejection:
        """The status of the file at ``location``, or why it cannot be used."""
        # Some exporters write 10^5 files into one folder, and resolving a path is slow.
        is_plain = re.fullmatch(r"[\w-][\w.-]*", location) is not None
        path = self._folder / location
        if not is_plain and not self.has(location):
            return _OUTSIDE
        if is_plain and os.path.islink(path):  # noqa: PTH114, the other raises for names that are too long
            if path.exists() and not self.has(location):
                message = f"is a link to {path.readlink()}, outside the model's folder."
                return Rejection(message, "Put the file itself beside the model.")
        elif is_missing(path):
            return _MISSING
        if rejection := unreadable(path):
            return rejection
        status = path.stat()
        is_pointer = status.st_size < _MAX_OF_A_POINTER and is_lfs_pointer(path)
        return _LFS_POINTER if is_pointer else status


def _ends(model: onnx.ModelProto) -> dict[str, int]:
    """Return each file of the model's external data -> the byte up to which the model uses it.

    Raises ModelError, without a location, when a tensor does not say where its data is.
    """
    ends: dict[str, int] = {}
    for tensor in _external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        name = entries.get("location", "")
        if not isinstance(name, str):
            raise _wrong(tensor, "location", name)
        needed = byte_size(tensor) or 0
        length = _bytes(tensor, "length", entries) if "length" in entries else needed
        if length != needed:
            raise _wrong(tensor, "length", f"{length}, and its shape needs {needed}")
        ends[name] = max(ends.get(name, 0), _bytes(tensor, "offset", entries) + length)
    return ends


def _external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for body in graph.bodies(model):
        yield from (tensor for tensor in graph.tensors(body) if graph.is_external(tensor))


def _bytes(tensor: onnx.TensorProto, name: str, entries: dict[str, str]) -> int:
    text = entries.get(name) or "0"
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,18}", text):
        raise _wrong(tensor, name, text)
    return int(text)


def _wrong(tensor: onnx.TensorProto, name: str, value: object) -> ModelError:
    shown = str(value)[:60]
    message = f"the external data of the tensor {tensor.name!r} has an invalid {name}: {shown}."
    hint = "Save the model and its data again."
    return ModelError(Problem(Kind.EXTERNAL_DATA, "", message, hint))
