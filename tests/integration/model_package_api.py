"""ONNX Runtime's C API for model packages through ``ctypes``, because Python has no binding for it.

The module stands alone, so that a script in another environment can import a copy of it: it needs
only an installed onnxruntime, whose shared library it loads. This library is not the one inside the
module ``onnxruntime``: keep the two in separate processes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

API_VERSION = 31
"""The first version of the C API that is known to have model packages at the places used here."""

# What ctypes makes of a C function.
_Function = Callable[..., Any]

# ORTCHAR_T, the characters of paths.
_PATH: Any = ctypes.c_wchar_p if sys.platform == "win32" else c_char_p
_STRINGS = POINTER(c_char_p)
_HANDLES = POINTER(c_void_p)
_SIZE = POINTER(c_size_t)

_LOG_ERRORS = 3


class OrtError(Exception):
    """A call that ONNX Runtime refused, with the message of its OrtStatus."""


class UnavailableError(Exception):
    """The installed ONNX Runtime cannot open model packages; the message is the reason."""


class _Api:
    """The functions of the C tables ``OrtApi`` and ``OrtModelPackageApi``.

    The numbers are places in the tables, which are stable: a new version only adds places at the end.
    """

    def __init__(self, library: Path) -> None:
        get_base = ctypes.CDLL(str(library)).OrtGetApiBase
        get_base.restype = c_void_p
        base = get_base()
        ort = _place(base, 0, c_void_p, c_uint32)(API_VERSION)
        if not ort:
            version = _place(base, 1, c_char_p)().decode()
            raise UnavailableError(f"ONNX Runtime {version} is older than 1.{API_VERSION}")
        self._error_message = _place(ort, 2, c_char_p, c_void_p)
        self._release_status = _place(ort, 93, None, c_void_p)
        self._add_general(ort)
        self._add_sessions(ort)
        self._add_packages(_place(ort, 427, c_void_p)())

    def _add_general(self, ort: int) -> None:
        self.create_env = self._checked(ort, 3, c_int, c_char_p, _HANDLES)
        self.release_env = _release(ort, 92)
        self.register_library = self._checked(ort, 301, c_void_p, c_char_p, _PATH)
        self.unregister_library = self._checked(ort, 302, c_void_p, c_char_p)
        self.ep_devices = self._checked(ort, 303, c_void_p, POINTER(_HANDLES), _SIZE)
        self.device_ep = _place(ort, 312, c_char_p, c_void_p)

    def _add_sessions(self, ort: int) -> None:
        self.create_options = self._checked(ort, 10, _HANDLES)
        self.release_options = _release(ort, 100)
        self.append_devices = self._checked(
            ort, 304, c_void_p, c_void_p, _HANDLES, c_size_t, _STRINGS, _STRINGS, c_size_t
        )
        self.release_session = _release(ort, 95)

    def _add_packages(self, table: int) -> None:
        self.create_package_options = self._checked(table, 0, c_void_p, c_void_p, _HANDLES)
        self.release_package_options = _release(table, 1)
        self.open_package = self._checked(table, 2, _PATH, _HANDLES)
        self.release_package = _release(table, 3)
        self.select = self._checked(table, 11, c_void_p, c_char_p, c_void_p, _HANDLES)
        self.release_component = _release(table, 12)
        self.selected_variant = self._checked(table, 13, c_void_p, _STRINGS)
        self.selected_folder = self._checked(table, 14, c_void_p, POINTER(_PATH))
        self.create_session = self._checked(table, 15, c_void_p, c_void_p, c_void_p, _HANDLES)

    def _checked(self, table: int, place: int, *arguments: Any) -> _Function:
        """A function that raises the OrtStatus that it gets as OrtError."""
        function = _place(table, place, c_void_p, *arguments)

        def call(*values: Any) -> None:
            status = function(*values)
            if status:
                message = self._error_message(status).decode()
                self._release_status(status)
                raise OrtError(message)

        return call


def _place(table: int, place: int, result: Any, *arguments: Any) -> _Function:
    address = ctypes.cast(table, _HANDLES)[place]
    assert address is not None
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def _release(table: int, place: int) -> _Function:
    return _place(table, place, None, c_void_p)


@contextmanager
def _made(create: _Function, release: _Function, *arguments: Any) -> Iterator[c_void_p]:
    """The object that ``create`` writes through its last argument."""
    handle = c_void_p()
    create(*arguments, byref(handle))
    try:
        yield handle
    finally:
        release(handle)


@dataclass(frozen=True)
class Component:
    """A component with the variant that ONNX Runtime selected for it, and the variant's folder."""

    variant: str
    folder: Path
    _api: _Api
    _env: c_void_p
    _handle: c_void_p

    def open(self) -> None:
        """Open a session of the variant, with the session and provider options of the manifest."""
        api = self._api
        with _made(api.create_session, api.release_session, self._env, self._handle, None):
            pass


@dataclass(frozen=True)
class Package:
    """An open model package."""

    _api: _Api
    _env: c_void_p
    _handle: c_void_p

    @contextmanager
    def select(self, component: str, ep: str, options: Mapping[str, str]) -> Iterator[Component]:
        """The component with the variant that fits the devices of ``ep``.

        ``options``: the provider options that the EP needs to start. Raises OrtError when no variant
        fits, and LookupError when the EP has no device here.
        """
        api = self._api
        with ExitStack() as stack:
            session_options = stack.enter_context(_made(api.create_options, api.release_options))
            self._append(session_options, ep, options)
            create, release = api.create_package_options, api.release_package_options
            choice = stack.enter_context(_made(create, release, self._env, session_options))
            handle = stack.enter_context(
                _made(api.select, api.release_component, self._handle, component.encode(), choice)
            )
            variant, folder = c_char_p(), _PATH()
            api.selected_variant(handle, byref(variant))
            api.selected_folder(handle, byref(folder))
            assert variant.value is not None
            path = folder.value if isinstance(folder.value, str) else folder.value.decode()
            yield Component(variant.value.decode(), Path(path), api, self._env, handle)

    def _append(self, session_options: c_void_p, ep: str, options: Mapping[str, str]) -> None:
        devices, count = _HANDLES(), c_size_t()
        self._api.ep_devices(self._env, byref(devices), byref(count))
        fitting = [d for d in devices[: count.value] if self._api.device_ep(d).decode() == ep]
        if not fitting:
            raise LookupError(f"{ep} has no device on this machine")
        self._api.append_devices(
            session_options, self._env, (c_void_p * len(fitting))(*fitting), len(fitting),
            _texts(options), _texts(options.values()), len(options),
        )  # fmt: skip


@dataclass(frozen=True)
class Runtime:
    """ONNX Runtime with its environment."""

    _api: _Api
    _env: c_void_p

    @contextmanager
    def registered(self, ep: str, library: Path) -> Iterator[None]:
        """The EP of a plugin library under the name ``ep``."""
        self._api.register_library(self._env, ep.encode(), _native(library))
        try:
            yield
        finally:
            self._api.unregister_library(self._env, ep.encode())

    @contextmanager
    def package(self, folder: Path) -> Iterator[Package]:
        """The model package in ``folder``. Raises OrtError with what is wrong with its manifest."""
        api = self._api
        with _made(api.open_package, api.release_package, _native(folder)) as handle:
            yield Package(api, self._env, handle)


@contextmanager
def runtime() -> Iterator[Runtime]:
    """The C API of the installed onnxruntime.

    Raises UnavailableError when it has no shared library, or when it is too old.
    """
    api = _Api(_installed_library())
    with _made(api.create_env, api.release_env, _LOG_ERRORS, b"model_package_api") as env:
        yield Runtime(api, env)


def _installed_library() -> Path:
    spec = importlib.util.find_spec("onnxruntime")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for pattern in ("libonnxruntime.so*", "onnxruntime.dll", "libonnxruntime*.dylib"):
            found = sorted(Path(folder, "capi").glob(pattern))
            if found:
                return found[0]
    raise UnavailableError("the installed onnxruntime has no shared library")


def _texts(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def _native(path: Path) -> str | bytes:
    return str(path) if sys.platform == "win32" else bytes(path)
