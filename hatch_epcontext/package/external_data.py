"""The files of a model's external data, read without onnx.

An sdist is made where nothing of what compiles is installed, and only for these names no front end should
install it. Only the fields of an ONNX file that can hold them are read; what is wrong with the rest is
found in the wheel's build, where `graph/external.py` reads them with onnx.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

Span = tuple[int, int]
"""The first byte of a message in the file, and the one after its last."""

_PARTS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor",
        11: "graph",
        22: "sparse tensor",
        23: "sparse tensor",
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
"""What messages of each kind contain, by the number of the field in onnx.proto."""

_GRAPH = 7
_TENSOR_EXTERNAL_DATA, _TENSOR_DATA_LOCATION = 13, 14
_EXTERNAL = 1
_ENTRY_KEY, _ENTRY_VALUE = 1, 2

_MAX_BITS = 70


def external_data(path: Path) -> tuple[str, ...]:
    """The files of the external data of the ONNX file at ``path`` as it names them, sorted.

    They are relative to its folder, may be missing, and may be anywhere. Raises ValueError if it is no ONNX
    file, and OSError if it cannot be read.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return tuple(sorted(set(_locations(data))))


def model_files(path: Path) -> list[Path]:
    """The ONNX file at ``path`` and those of its external data, without what is missing.

    Of a file that cannot be read the build says why.
    """
    names: tuple[str, ...] = ()
    with contextlib.suppress(OSError, ValueError):
        names = external_data(path)
    return [file for file in (path, *(path.parent / name for name in names)) if file.is_file()]


def _locations(data: mmap.mmap) -> Iterator[str]:
    whole = (0, len(data))
    if not any(number == _GRAPH for number, _ in _fields(data, whole)):
        raise ValueError("the file has no graph")
    # A stack instead of recursion: anybody can nest graphs deeply.
    parts: list[tuple[str, Span]] = [("model", whole)]
    while parts:
        kind, span = parts.pop()
        if kind == "tensor":
            yield from _locations_of(data, span)
            continue
        inside = _PARTS[kind]
        for number, value in _fields(data, span):
            if number in inside and not isinstance(value, int):
                parts.append((inside[number], value))


def _locations_of(data: mmap.mmap, tensor: Span) -> Iterator[str]:
    locations, is_external = [], False
    for number, value in _fields(data, tensor):
        if number == _TENSOR_DATA_LOCATION:
            is_external = value == _EXTERNAL
        elif number == _TENSOR_EXTERNAL_DATA and not isinstance(value, int):
            entry = dict(_fields(data, value))
            if _text(data, entry.get(_ENTRY_KEY)) == "location":
                locations.append(_text(data, entry.get(_ENTRY_VALUE)))
    if is_external:
        yield from locations


def _text(data: mmap.mmap, value: int | Span | None) -> str:
    return data[slice(*value)].decode() if isinstance(value, tuple) else ""


def _fields(data: mmap.mmap, span: Span) -> Iterator[tuple[int, int | Span]]:
    """The fields of a message: the number of each, and its integer or the span of its bytes."""
    position, end = span
    while position < end:
        key, position = _varint(data, position, end)
        value: int | Span = 0
        match key & 7:
            case 0:
                value, position = _varint(data, position, end)
            case 1:
                position += 8
            case 2:
                size, position = _varint(data, position, end)
                value = (position, position + size)
                position += size
            case 5:
                position += 4
            case _:
                raise ValueError("the file is no message of protobuf")
        if position > end:
            raise ValueError("the file ends too early")
        yield key >> 3, value


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    """An integer of a message, and the position after it."""
    value = 0
    for shift in range(0, _MAX_BITS, 7):
        if position >= end:
            raise ValueError("the file ends too early")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("the file is no message of protobuf")
