"""Provider options: their form in TOML, and in ONNX Runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.shipped import OPTION_FILE

Scalar = bool | int | float | str
OptionValue = Scalar | Mapping[str, Any] | tuple[Scalar, ...]
Scope = Literal["compile", "load", "both"]
Kind = Literal["bool", "int", "text", "json", "file", "output", "pointer"]

_SECRET = re.compile(r"\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Option:
    """One provider option.

    ``doc`` and ``default``, the EP's default, are for the documentation. ``scope``: an option of scope
    ``"compile"`` counts when a model is compiled, and is not shipped; ``"load"`` counts when a session is
    opened; ``"both"`` counts for both. A ``"file"`` is read by the EP, and an ``"output"`` written.
    """

    doc: str
    kind: Kind = "text"
    default: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    pattern: str | None = None
    """A regular expression that the whole value has to match."""
    form: str | None = None
    """A description of ``pattern`` for messages."""
    scope: Scope = "compile"
    booleans: tuple[str, str] = ("0", "1")
    """The EP's spelling of false and of true."""
    several: bool = False
    """Whether it may be a list, with a value for each chip of a context."""
    in_file: bool = False
    """Whether the EP reads JSON from a file, and the option is its path."""
    paths: str = r".+"
    """A regular expression that finds each path in a ``"file"``: its last group, or all of it."""
    secret: bool = False
    """Whether it is a key or a password: then the configuration contains only the name of a variable."""

    @property
    def allowed(self) -> str:
        """The valid values, for messages."""
        lists = ", or a list of them, one for each chip" if self.several else ""
        return f"{self._allowed_once}{lists}"

    @property
    def _allowed_once(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind == "int":
            bounds = [f"at least {self.minimum}"] if self.minimum is not None else []
            bounds += [f"at most {self.maximum}"] if self.maximum is not None else []
            return " ".join(["a whole number", *bounds])
        if self.secret:
            return '"{env:NAME}", with the name of an environment variable'
        if self.form:
            return self.form
        return {
            "bool": "true or false",
            "text": "a string",
            "json": "a table, a string of JSON, or the path of a JSON file",
            "file": "the path of a file",
            "output": "a path",
            "pointer": "an address in the app's memory, which only the app knows",
        }[self.kind]

    def render(self, value: OptionValue) -> str:
        """``value`` as the string for the EP.

        Raises ValueError with the allowed values. EPs accept impossible values without an error.
        """
        if self.several:
            return ",".join(map(self._render_once, _items(value)))
        return self._render_once(value)

    def _render_once(self, value: OptionValue) -> str:
        text = render(value)
        if not self._fits(value, text):
            raise ValueError(self.allowed)
        if self.kind == "bool":
            return self.booleans[text.lower() in ("1", "true")]
        return f"{OPTION_FILE}{text}" if self.in_file and _is_json_object(text) else text

    def _fits(self, value: OptionValue, text: str) -> bool:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return False
        if self.secret:
            return variable_of(text) is not None
        if self.choices:
            return text in self.choices
        if self.pattern:
            return not isinstance(value, bool) and re.fullmatch(self.pattern, text) is not None
        return {
            "bool": text.lower() in ("0", "1", "false", "true"),
            "int": not isinstance(value, bool) and self._in_range(text),
            "json": isinstance(value, Mapping)
            or _is_json_object(text)
            or (isinstance(value, str) and text[:1] not in ("", "{", "[")),
            "pointer": False,
            **dict.fromkeys(("text", "file", "output"), isinstance(value, str)),
        }[self.kind]

    def _in_range(self, text: str) -> bool:
        if not re.fullmatch(r"-?\d+", text):
            return False
        above = self.minimum is None or int(text) >= self.minimum
        return above and (self.maximum is None or int(text) <= self.maximum)


def _items(value: OptionValue) -> Sequence[OptionValue]:
    """The items of a list, also of a list as text; an empty list fits no option."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    if isinstance(value, Sequence):
        return value or [()]
    return [value]


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def render(value: OptionValue) -> str:
    """A TOML value as the string for ONNX Runtime.

    ``true`` becomes ``"1"``, a table JSON, and a list its items with commas between them.
    """
    if isinstance(value, Mapping):
        # `default`, because TOML has dates and JSON has none.
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(render, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def switch(
    doc: str,
    default: str = "0",
    scope: Scope = "compile",
    booleans: tuple[str, str] = ("0", "1"),
) -> Option:
    """An option that is true or false."""
    return Option(doc, kind="bool", default=default, scope=scope, booleans=booleans)


def number(
    doc: str,
    default: str = "0",
    minimum: int | None = 0,
    maximum: int | None = None,
    scope: Scope = "compile",
    *,
    several: bool = False,
) -> Option:
    """An option that is a whole number."""
    return Option(
        doc, "int", default, minimum=minimum, maximum=maximum, scope=scope, several=several
    )


def choice(
    doc: str, *choices: str, default: str = "", scope: Scope = "compile", several: bool = False
) -> Option:
    """An option with one of a few values."""
    return Option(doc, default=default, choices=choices, scope=scope, several=several)


def variable_of(value: object) -> str | None:
    """The environment variable in ``value``, if that is ``"{env:NAME}"``: then the option is a secret.

    Only workers read the variable. Everywhere else options contain its name.
    """
    match = _SECRET.fullmatch(value) if isinstance(value, str) else None
    return match[1] if match else None


def secrets_in(options: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the secrets among ``options``."""
    return tuple(name for name, value in options.items() if variable_of(value))


def variables_in(text: str) -> frozenset[str]:
    """The environment variables of all secrets in ``text``, such as that of a request."""
    return frozenset(re.findall(f'"{_SECRET.pattern}"', text))


def pointer(doc: str) -> Option:
    """An address in memory: a configuration cannot contain one; the app passes it to the loader."""
    return Option(doc, kind="pointer", default="0", scope="load")
