"""``HATCH_EPCONTEXT_*``: settings that win over TOML, for CI and one-off builds."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from hatch_epcontext.config.location import PRIVATE, key_bytes
from hatch_epcontext.config.tables import (
    BuildTable,
    Editable,
    ValidationMode,
    WheelTable,
    declaration_of,
    declare,
    faults_of_key,
    must_be,
    readable_by,
)
from hatch_epcontext.errors import ConfigError, Diagnosed, Kind, Problem, collect
from hatch_epcontext.frozen import dataclass, types_of
from hatch_epcontext.serialize import from_text
from hatch_epcontext.text import hide_url_credentials, show, suggestion, toml_key

PREFIX = "HATCH_EPCONTEXT_"

ALL = "all"
"""All targets, in ``HATCH_EPCONTEXT_FROM_CACHE``; no target can have this name."""

CREDENTIALS = frozenset(
    {
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_TOKEN",
        "HATCH_EPCONTEXT_SHARED_CACHE_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    }
)
"""The variables with credentials of the shared cache and of model hubs: they are never printed, and no worker
gets them."""

REPORT_SUFFIXES = (".html", ".json")

_EPOCH = 1580601600
"""The time of files in archives without SOURCE_DATE_EPOCH, which hatchling uses too: 2020-02-02."""

_LAST = 0xFFFFFFFF
"""The last time that gzip has, in 2106; zip has one more year."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The settings of the environment; None or False if a variable is not set.

    ``build`` and ``wheel`` have the keys of these tables that the environment sets. ``overrides``: all
    settings as text, without secrets.
    """

    skip: bool = declare("Builds a wheel without models, and installs nothing for them.", False)
    targets: tuple[str, ...] | None = declare("Builds only these targets, and checks no others.")
    from_cache: tuple[str, ...] | None = declare(
        "Takes these targets only from the cache, whatever is installed: see "
        "[several ONNX Runtimes](targets.md#several-onnx-runtimes). With `all` the build needs no "
        "packages."
    )
    cache_dir: Path | None = declare(
        "The absolute path of the cache. The default is the user's cache folder."
    )
    no_cache: bool = declare(
        "Neither reads nor writes the cache, that of the user or a shared one.", False
    )
    shared_cache_write: bool = declare(
        "Writes to `build.shared-cache` too, signed with `HATCH_EPCONTEXT_SHARED_CACHE_KEY`.", False
    )
    shared_cache_key: str | None = declare(
        "The signing key of the shared cache. It is never printed.",
        check=readable_by(partial(key_bytes, PRIVATE)),
        is_secret=True,
    )
    editable: Editable | None = declare("Wins over `editable`.")
    validate: ValidationMode | None = declare("Wins over the `validate` mode of all models.")
    report: Path | None = declare(
        "Writes a report of the build to this absolute path (`.html` or `.json`), also when jobs "
        "fail. Of existing files only unchanged reports are replaced.",
        check=must_be(
            f"a path that ends in {' or '.join(REPORT_SUFFIXES)}",
            lambda path: path.suffix in REPORT_SUFFIXES,
        ),
    )
    offline: bool = declare(
        "Downloads no models: those from elsewhere must be in the user's cache. `epcontext fetch` puts them "
        "there.",
        False,
    )
    build: Mapping[str, Any] = field(default_factory=dict)
    wheel: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    @property
    def only_from_cache(self) -> bool:
        """Whether the build compiles nothing, and needs no packages."""
        return ALL in (self.from_cache or ())


@dataclass(frozen=True)
class Variable:
    """A variable for the ``key`` of a table, whose values have this ``type``.

    ``table``: ``build`` or ``wheel``; empty for a setting that is only a variable.
    """

    key: dataclasses.Field[Any]
    type: Any
    table: str

    @property
    def doc(self) -> str:
        """What it does."""
        own = f"Wins over `{self.table}.{toml_key(self.key.name)}`."
        return own if self.table else declaration_of(self.key).doc

    @property
    def is_secret(self) -> bool:
        """Whether no message shows an invalid value. An empty one is the value None."""
        return declaration_of(self.key).is_secret

    def read(self, text: str) -> Any:
        """The value in ``text``; raises ValueError with the allowed values."""
        value = from_text(text, self.type)
        if isinstance(value, Path):
            value = _absolute(value)
        for _, allowed, _ in faults_of_key(self.key, value):
            raise ValueError(allowed)
        return value


def _absolute(path: Path) -> Path:
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError("a path without ~, because this user has no home folder") from None
    # A front end may build in a temporary folder.
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


def read_environment(environ: Mapping[str, str]) -> Diagnosed[Environment]:
    """Return the settings in ``environ``, and yield problems.

    An empty variable counts as unset, unless it switches something off.
    """
    texts = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX)
    }
    settings: dict[str, Any] = {"": {}, "build": {}, "wheel": {}}
    overrides = []
    for name, text in texts.items():
        location, variable = PREFIX + name, VARIABLES.get(name)
        if not text and not (variable and variable.is_secret):
            continue
        if location not in CREDENTIALS:
            overrides.append(f"{location}={hide_url_credentials(text)}")
        if variable is None:
            # Without the prefix, which makes any two similar.
            hint = f"{suggestion(name, VARIABLES)} All begin with {PREFIX}."
            yield Problem(Kind.INVALID_VARIABLE, location, "is not a known variable.", hint)
            continue
        try:
            settings[variable.table][variable.key.name] = variable.read(text) if text else None
        except ValueError as allowed:
            shown = "" if variable.is_secret else f", not {show(text)}"
            yield Problem(Kind.INVALID_VARIABLE, location, f"must be {allowed}{shown}.")
    tables = {name: settings[name] for name in ("build", "wheel")}
    return Environment(**settings[""], **tables, overrides=tuple(overrides))


def environment_or_error() -> Environment:
    """The settings of this process; raises ConfigError."""
    environment, problems = collect(read_environment(os.environ))
    ConfigError.check(problems)
    return environment


def source_date() -> int:
    """The time of files in archives, in seconds since 1970.

    Raises ConfigError if SOURCE_DATE_EPOCH is none, or one that archives do not have: hatchling, which reads
    it too, would fail after everything is compiled.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", str(_EPOCH))
    # No int() of a text of any length.
    if re.fullmatch("0*[0-9]{1,10}", text) and int(text[-10:]) <= _LAST:
        return int(text[-10:])
    message = (
        f"must be a number of seconds since 1970, at most {_LAST} (in 2106), not {show(text)}."
    )
    hint = "Unset it, or set it, for example, to the output of: git log -1 --format=%ct"
    raise ConfigError(Problem(Kind.INVALID_VARIABLE, "SOURCE_DATE_EPOCH", message, hint))


def reason_to_skip() -> str | None:
    """Why a build leaves the models out, if the environment says so."""
    environment, _ = collect(read_environment(os.environ))
    return f"{PREFIX}SKIP is set" if environment.skip else None


def _variables(table: type[Any], name: str = "") -> Mapping[str, Variable]:
    """The variables for the keys of ``table``, which is the table ``name`` of the configuration."""
    types = types_of(table)
    return {
        key.name.upper(): Variable(key, types[key.name], name)
        for key in dataclasses.fields(table)
        if key.metadata and declaration_of(key).has_variable
    }


VARIABLES: Mapping[str, Variable] = {
    **_variables(Environment),
    **_variables(BuildTable, "build"),
    **_variables(WheelTable, "wheel"),
}
"""All variables, by their name after ``HATCH_EPCONTEXT_``."""
