"""``HATCH_EPCONTEXT_*``: settings that win over TOML, for CI and one-off builds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hatch_epcontext.config.settings import CREDENTIALS
from hatch_epcontext.config.shared_cache import private_bytes
from hatch_epcontext.config.tables import (
    BuildTable,
    Editable,
    ValidationMode,
    WheelTable,
    faults_of_key,
)
from hatch_epcontext.errors import Diagnosed, Kind, Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.serialize import from_text
from hatch_epcontext.text import hide_url_credentials, show, suggestion, toml_key

PREFIX = "HATCH_EPCONTEXT_"

ALL = "all"
"""All targets, in ``HATCH_EPCONTEXT_FROM_CACHE``; no target can have this name."""

REPORT_SUFFIXES = (".html", ".json")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Environment:
    """The settings of the environment; None if a variable is not set.

    ``build`` and ``wheel`` have the keys of these tables that the environment sets. ``overrides``: all
    settings as text, without secrets.
    """

    skip: bool = False
    targets: tuple[str, ...] | None = None
    from_cache: tuple[str, ...] | None = None
    cache_dir: Path | None = None
    no_cache: bool = False
    shared_cache_write: bool = False
    shared_cache_key: str | None = field(default=None, repr=False)
    editable: Editable | None = None
    validate: ValidationMode | None = None
    report: Path | None = None
    offline: bool = False
    build: Mapping[str, Any] = field(default_factory=dict)
    wheel: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variable:
    """A variable: an example of its value, its documentation, and the function that reads its text.

    ``read`` raises ValueError with the allowed values. ``table`` is the table of `Environment` that gets the
    value. With ``empty_switches_off`` an empty variable is the value None. With ``hidden`` no message shows
    an invalid value: it may be a secret, or a URL with a password.
    """

    example: str
    doc: str
    read: Callable[[str], Any]
    table: Literal["build", "wheel"] | None = None
    empty_switches_off: bool = False
    hidden: bool = False


def read_environment(environ: Mapping[str, str]) -> Diagnosed[Environment]:
    """Return the settings in ``environ``, and yield problems.

    An empty variable counts as unset, unless it switches something off.
    """
    variables = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and _counts(name.removeprefix(PREFIX), value.strip())
    }
    settings: dict[str, Any] = {"build": {}, "wheel": {}}
    for name, text in variables.items():
        location = PREFIX + name
        if (variable := VARIABLES.get(name)) is None:
            # Without the prefix, which makes any two similar.
            hint = f"{suggestion(name, VARIABLES)} All begin with {PREFIX}."
            yield Problem(Kind.INVALID_VARIABLE, location, "is not a known variable.", hint)
            continue
        try:
            value = variable.read(text) if text else None
        except ValueError as allowed:
            shown = "" if variable.hidden else f", not {show(text)}"
            message = f"must be {allowed}{shown}."
            yield Problem(Kind.INVALID_VARIABLE, location, message)
            continue
        (settings[variable.table] if variable.table else settings)[name.lower()] = value
    overrides = tuple(
        f"{PREFIX}{name}={hide_url_credentials(text)}"
        for name, text in variables.items()
        if PREFIX + name not in CREDENTIALS
    )
    return Environment(**settings, overrides=overrides)


def _counts(name: str, text: str) -> bool:
    variable = VARIABLES.get(name)
    return bool(text) or (variable is not None and variable.empty_switches_off)


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("1 or 0")
    return text.lower() in _TRUE


def _private_key(text: str) -> str:
    private_bytes(text)
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _path(text: str) -> Path:
    if re.match(r"[A-Za-z][\w+.-]+:/", text):
        raise ValueError(
            f"a path, not a URL: that of a shared cache belongs in {PREFIX}SHARED_CACHE"
        )
    return _expand(text).absolute()


def _report(text: str) -> Path:
    # A front end may build in a temporary folder.
    path = _expand(text)
    if not path.is_absolute() or path.suffix not in REPORT_SUFFIXES:
        raise ValueError(f"an absolute path that ends in {' or '.join(REPORT_SUFFIXES)}")
    return _path(text)


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("a path without ~, because this user has no home folder") from None


def _validate(text: str) -> Any:
    return False if text.lower() in _FALSE else from_text(text, ValidationMode)


def _variables_of(table: type[Any], name: Literal["build", "wheel"]) -> Mapping[str, Variable]:
    """A variable for each key of ``table``, which is the table ``name`` of the configuration."""
    hints = get_type_hints(table)
    return {
        key.name.upper(): Variable(
            "a,b" if hints[key.name] == tuple[str, ...] else "VALUE",
            f"Wins over `{name}.{toml_key(key.name)}`"
            + (", and switches it off when empty." if key.metadata["empty_switches_off"] else "."),
            _reader(hints[key.name], key),
            name,
            key.metadata["empty_switches_off"],
            key.metadata["is_url"],
        )
        for key in dataclasses.fields(table)
        if key.metadata["has_variable"]
    }


def _reader(type_: Any, key: dataclasses.Field[Any] | None = None) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if type_ is bool:
            value: Any = _switch(text)
        else:
            value = _names(text) if type_ == tuple[str, ...] else from_text(text, type_)
        for _, allowed, _ in () if key is None else faults_of_key(key, value):
            raise ValueError(allowed)
        return value

    return read


VARIABLES: Mapping[str, Variable] = {
    "SKIP": Variable("1", "Builds a wheel without models, and installs nothing for them.", _switch),
    "TARGETS": Variable("a,b", "Builds only these targets.", _names),
    "FROM_CACHE": Variable(
        "a,b",
        "Takes these targets only from the cache, whatever is installed: see "
        "[several ONNX Runtimes](targets.md#several-onnx-runtimes). With `all` the build needs no "
        "packages.",
        _names,
    ),
    "CACHE_DIR": Variable(
        "DIR", "The folder of the cache. The default is the user's cache folder.", _path
    ),
    "NO_CACHE": Variable(
        "1", "Neither reads nor writes the cache, that of the user or a shared one.", _switch
    ),
    "SHARED_CACHE_WRITE": Variable(
        "1",
        "Writes to `build.shared-cache` too, signed with `HATCH_EPCONTEXT_SHARED_CACHE_KEY`.",
        _switch,
    ),
    "SHARED_CACHE_KEY": Variable(
        "ed25519-private:...",
        "The signing key of the shared cache. It is never printed.",
        _private_key,
        hidden=True,
    ),
    "EDITABLE": Variable("compile", "Wins over `editable`.", _reader(Editable)),
    "VALIDATE": Variable("require", "Wins over the `validate` mode of all models.", _validate),
    "REPORT": Variable(
        "/DIR/F.html",
        "Writes a report of the build as `.html` or `.json`, also when jobs fail.",
        _report,
    ),
    "OFFLINE": Variable(
        "1",
        "Downloads no models: those from elsewhere must be in the user's cache. `epcontext fetch` puts them "
        "there.",
        _switch,
    ),
    **_variables_of(BuildTable, "build"),
    **_variables_of(WheelTable, "wheel"),
}
"""All variables, by their name after ``HATCH_EPCONTEXT_``."""
