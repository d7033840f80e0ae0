"""``HATCH_EPCONTEXT_*``: settings that win over TOML, for CI and one-off builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hatch_epcontext.config.location import PRIVATE, key_bytes
from hatch_epcontext.config.settings import CREDENTIALS
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


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("1 or 0")
    return text.lower() in _TRUE


def _private_key(text: str) -> str:
    key_bytes(PRIVATE, text)
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("a path without ~, because this user has no home folder") from None


def _report(text: str) -> Path:
    path = _path(text)
    # A front end may build in a temporary folder.
    is_absolute = text[0] == "~" or Path(text).is_absolute()
    if not is_absolute or path.suffix not in REPORT_SUFFIXES:
        raise ValueError(f"an absolute path that ends in {' or '.join(REPORT_SUFFIXES)}")
    return path


def _validate(text: str) -> Any:
    return False if text.lower() in _FALSE else from_text(text, ValidationMode)


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


def _variable(
    doc: str,
    read: Callable[[str], Any] = _switch,
    example: str = "1",
    default: Any = None,
    *,
    hidden: bool = False,
) -> Any:
    """A field of `Environment` that a variable of its name sets."""
    variable = Variable(example, doc, read, hidden=hidden)
    return field(default=default, repr=not hidden, metadata={"variable": variable})


@dataclass(frozen=True)
class Environment:
    """The settings of the environment; None or False if a variable is not set.

    ``build`` and ``wheel`` have the keys of these tables that the environment sets. ``overrides``: all
    settings as text, without secrets.
    """

    skip: bool = _variable(
        "Builds a wheel without models, and installs nothing for them.", default=False
    )
    targets: tuple[str, ...] | None = _variable("Builds only these targets.", _names, "a,b")
    from_cache: tuple[str, ...] | None = _variable(
        "Takes these targets only from the cache, whatever is installed: see "
        "[several ONNX Runtimes](targets.md#several-onnx-runtimes). With `all` the build needs no "
        "packages.",
        _names,
        "a,b",
    )
    cache_dir: Path | None = _variable(
        "The folder of the cache. The default is the user's cache folder.", _path, "DIR"
    )
    no_cache: bool = _variable(
        "Neither reads nor writes the cache, that of the user or a shared one.", default=False
    )
    shared_cache_write: bool = _variable(
        "Writes to `build.shared-cache` too, signed with `HATCH_EPCONTEXT_SHARED_CACHE_KEY`.",
        default=False,
    )
    shared_cache_key: str | None = _variable(
        "The signing key of the shared cache. It is never printed.",
        _private_key,
        "ed25519-private:...",
        hidden=True,
    )
    editable: Editable | None = _variable("Wins over `editable`.", _reader(Editable), "compile")
    validate: ValidationMode | None = _variable(
        "Wins over the `validate` mode of all models.", _validate, "require"
    )
    report: Path | None = _variable(
        "Writes a report of the build as `.html` or `.json`, also when jobs fail. Of existing files "
        "only reports are replaced.",
        _report,
        "/DIR/F.html",
    )
    offline: bool = _variable(
        "Downloads no models: those from elsewhere must be in the user's cache. `epcontext fetch` puts them "
        "there.",
        default=False,
    )
    build: Mapping[str, Any] = field(default_factory=dict)
    wheel: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


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


def _variables_of(table: type[Any], name: Literal["build", "wheel"]) -> Mapping[str, Variable]:
    """A variable for each key of ``table``, which is the table ``name`` of the configuration."""
    hints = get_type_hints(table)
    return {
        key.name.upper(): Variable(
            "VALUE",
            f"Wins over `{name}.{toml_key(key.name)}`.",
            _reader(hints[key.name], key),
            name,
            key.metadata["empty_switches_off"],
            key.metadata["is_url"],
        )
        for key in dataclasses.fields(table)
        if key.metadata["has_variable"]
    }


VARIABLES: Mapping[str, Variable] = {
    **{
        own.name.upper(): own.metadata["variable"]
        for own in dataclasses.fields(Environment)
        if "variable" in own.metadata
    },
    **_variables_of(BuildTable, "build"),
    **_variables_of(WheelTable, "wheel"),
}
"""All variables, by their name after ``HATCH_EPCONTEXT_``."""
