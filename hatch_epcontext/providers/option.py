"""Provider options: as TOML writes them, and as an EP reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Scalar = bool | int | float | str
OptionValue = Scalar | Mapping[str, Any]
Scope = Literal["compile", "load", "both"]
Kind = Literal["bool", "int", "text", "json", "pointer"]


@dataclass(frozen=True)
class Option:
    """One provider option, as TOML writes it and as the EP reads it.

    ``scope`` says where the option counts: ``"compile"`` when the artifact is made, ``"load"`` when
    a session is opened, ``"both"`` for the two. An option of scope ``"compile"`` is not shipped.
    ``doc`` is for the documentation; ``default`` is what the EP takes if nothing is given.
    """

    doc: str
    kind: Kind = "text"
    default: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    pattern: str = ""
    form: str = ""
    """What ``pattern`` asks for, in words."""
    scope: Scope = "compile"
    booleans: tuple[str, str] = ("0", "1")
    """How the EP spells false and true."""

    @property
    def allowed(self) -> str:
        """What the option takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind == "int":
            bounds = [f"at least {self.minimum}"] if self.minimum is not None else []
            bounds += [f"at most {self.maximum}"] if self.maximum is not None else []
            return " ".join(["a whole number", *bounds])
        if self.form:
            return self.form
        return {
            "bool": "true or false",
            "text": "a string",
            "json": "a table, or a string of JSON",
            "pointer": "an address in the app's memory, which only the app can give",
        }[self.kind]

    def render(self, value: OptionValue) -> str:
        """The string that the EP wants for ``value``.

        Raises ValueError with what is allowed, because EPs take impossible values in silence.
        """
        text = render(value)
        if not self._fits(value, text):
            raise ValueError(self.allowed)
        if self.kind == "bool":
            return self.booleans[text.lower() in ("1", "true")]
        return text

    def _fits(self, value: OptionValue, text: str) -> bool:
        if self.choices:
            return text in self.choices
        if self.pattern:
            return not isinstance(value, bool) and re.fullmatch(self.pattern, text) is not None
        return {
            "bool": text.lower() in ("0", "1", "false", "true"),
            "int": not isinstance(value, bool) and self._in_range(text),
            "json": isinstance(value, Mapping) or _is_json_object(text),
            "pointer": False,
            "text": isinstance(value, str),
        }[self.kind]

    def _in_range(self, text: str) -> bool:
        if not re.fullmatch(r"-?\d+", text):
            return False
        above = self.minimum is None or int(text) >= self.minimum
        return above and (self.maximum is None or int(text) <= self.maximum)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def render(value: OptionValue) -> str:
    """A TOML value as the string that ONNX Runtime wants: ``true`` becomes ``"1"``, a table JSON."""
    if isinstance(value, Mapping):
        # TOML has dates, and JSON has none.
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
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
) -> Option:
    """An option that is a whole number."""
    return Option(doc, "int", default, minimum=minimum, maximum=maximum, scope=scope)


def choice(doc: str, *choices: str, default: str = "", scope: Scope = "compile") -> Option:
    """An option that takes one of a few values."""
    return Option(doc, default=default, choices=choices, scope=scope)


def text(doc: str, default: str = "", scope: Scope = "compile") -> Option:
    """An option that takes any string."""
    return Option(doc, default=default, scope=scope)


def pointer(doc: str) -> Option:
    """An address, which no configuration can hold: the app gives it to the loader."""
    return Option(doc, kind="pointer", default="0", scope="load")
