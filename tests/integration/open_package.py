"""Selects and opens a variant of a model package by ONNX Runtime's C API: Python has no binding for it.

A script for a process of its own, in an environment with onnxruntime, whose shared library it loads. That is
not the one inside the module ``onnxruntime``, which must stay out of the process. Nothing is released.

Arguments: the folder, the component, the EP, its provider options as JSON, and the file for the answer: the
names of the variant and of its folder, ONNX Runtime's error, or why it cannot open model packages.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_void_p, pointer
from pathlib import Path
from typing import Any

API_VERSION = 31
"""The first version of the C API that is known to have model packages at the places used here."""

# ORTCHAR_T, the characters of paths.
PATH: Any = ctypes.c_wchar_p if sys.platform == "win32" else c_char_p


def native(path: Path | str) -> Any:
    return PATH(str(path) if sys.platform == "win32" else os.fsencode(path))


def place(table: Any, number: int, result: Any, *arguments: Any) -> Any:
    """A function of a C table. The places are stable: a new version only adds some at the end."""
    address: Any = ctypes.cast(table, POINTER(c_void_p))[number]
    return ctypes.CFUNCTYPE(result, *arguments)(address)


class OrtError(Exception):
    """A call that ONNX Runtime refused, with the message of its OrtStatus."""


class Api:
    """The tables ``OrtApi`` and ``OrtModelPackageApi``."""

    def __init__(self) -> None:
        get_base = ctypes.CDLL(str(installed_library())).OrtGetApiBase
        get_base.restype = c_void_p
        base = get_base()
        self.ort = place(base, 0, c_void_p, c_uint32)(API_VERSION)
        if not self.ort:
            version = place(base, 1, c_char_p)().decode()
            raise LookupError(f"ONNX Runtime {version} is older than 1.{API_VERSION}")
        self.packages = place(self.ort, 427, c_void_p)()

    def call(self, table: Any, number: int, *values: Any) -> None:
        status = place(table, number, c_void_p, *map(type, values))(*values)
        if status:
            raise OrtError(place(self.ort, 2, c_char_p, c_void_p)(status).decode())

    def new(self, table: Any, number: int, *values: Any) -> c_void_p:
        """The object that a function writes through its last argument."""
        handle = c_void_p()
        self.call(table, number, *values, pointer(handle))
        return handle


def installed_library() -> Path:
    spec = importlib.util.find_spec("onnxruntime")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for pattern in ("libonnxruntime.so*", "onnxruntime.dll", "libonnxruntime*.dylib"):
            for file in Path(folder, "capi").glob(pattern):
                return file
    raise LookupError("the installed onnxruntime has no shared library")


def texts(words: Iterable[str]) -> Any:
    encoded = [word.encode() for word in words]
    return ctypes.cast((c_char_p * len(encoded))(*encoded), POINTER(c_char_p))


def opened(folder: str, component: str, ep: str, options: dict[str, str]) -> tuple[str, str]:
    """The variant that ONNX Runtime selects and opens for the devices of ``ep``, and its folder."""
    api = Api()
    ort, packages = api.ort, api.packages
    env = api.new(ort, 3, c_int(3), c_char_p(b"open_package"))
    if ep == "QNNExecutionProvider":
        import onnxruntime_qnn

        library = native(onnxruntime_qnn.get_library_path())
        api.call(ort, 301, env, c_char_p(ep.encode()), library)
    package = api.new(packages, 2, native(folder))
    devices, count = POINTER(c_void_p)(), c_size_t()
    api.call(ort, 303, env, pointer(devices), pointer(count))
    ep_of = place(ort, 312, c_char_p, c_void_p)
    fitting = [device for device in devices[: count.value] if ep_of(device).decode() == ep]
    session_options = api.new(ort, 10)
    handles = ctypes.cast((c_void_p * len(fitting))(*fitting), POINTER(c_void_p))
    api.call(
        ort, 304, session_options, env, handles, c_size_t(len(fitting)),
        texts(options), texts(options.values()), c_size_t(len(options)),
    )  # fmt: skip
    choice = api.new(packages, 0, env, session_options)
    selected = api.new(packages, 11, package, c_char_p(component.encode()), choice)
    variant, place_of_variant = c_char_p(), PATH()
    api.call(packages, 13, selected, pointer(variant))
    api.call(packages, 14, selected, pointer(place_of_variant))
    api.new(packages, 15, env, selected, c_void_p())
    return (variant.value or b"").decode(), os.fsdecode(place_of_variant.value)


def main(folder: str, component: str, ep: str, options: str, answer: str) -> None:
    try:
        names = opened(folder, component, ep, json.loads(options))
        result: dict[str, Any] = {"opened": names}
    except OrtError as error:
        result = {"error": str(error)}
    except LookupError as error:
        result = {"unavailable": str(error)}
    Path(answer).write_text(json.dumps(result), encoding="utf-8")
    # Libraries that were not released may crash at the end.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
