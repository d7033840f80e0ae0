"""Provider options: their spelling in TOML, and in ONNX Runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hatch_epcontext.frozen import dataclass

Scalar = bool | int | float | str
OptionValue = Scalar | Mapping[str, Any] | tuple[Scalar, ...]
Scope = Literal["compile", "load", "both"]
Kind = Literal["bool", "int", "text", "json", "file"]


@dataclass(frozen=True)
class Option:
    """The values of a provider option. What it means, and its default, are in the EP's documentation.

    ``scope``: an option of scope ``"compile"`` counts when a model is compiled, and is not shipped;
    ``"load"`` counts when a session is opened; ``"both"`` counts for both. A ``"file"`` is read by the EP.
    """

    kind: Kind = "text"
    scope: Scope = "compile"
    choices: tuple[str, ...] = ()
    minimum: int = 0
    paths: str = r".+"
    """A regular expression that finds each path in a ``"file"``: its last group, or all of it."""

    @property
    def allowed(self) -> str:
        """The valid values, for messages."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return {
            "bool": "true or false",
            "int": f"a whole number, at least {self.minimum}",
            "text": "a string",
            "json": "a table, or a string of JSON",
            "file": "the path of a file",
        }[self.kind]

    def render(self, value: OptionValue) -> str:
        """``value`` as the string for the EP.

        Raises ValueError with the allowed values. EPs accept impossible values without an error.
        """
        text = render(value)
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if is_list or not self._fits(value, text):
            raise ValueError(self.allowed)
        return str(int(text.lower() in ("1", "true"))) if self.kind == "bool" else text

    def _fits(self, value: OptionValue, text: str) -> bool:
        if self.choices:
            return text in self.choices
        return {
            "bool": text.lower() in ("0", "1", "false", "true"),
            "int": not isinstance(value, bool)
            and re.fullmatch(r"-?\d+", text) is not None
            and int(text) >= self.minimum,
            "json": isinstance(value, Mapping) or _is_json_object(text),
            **dict.fromkeys(("text", "file"), isinstance(value, str)),
        }[self.kind]


def named(
    names: str, kind: Kind, scope: Scope = "compile", *, minimum: int = 0
) -> dict[str, Option]:
    """Options of one kind, by their names."""
    return dict.fromkeys(names.split(), Option(kind, scope, minimum=minimum))


def choice(values: str, scope: Scope = "compile") -> Option:
    """An option with one of a few values."""
    return Option("text", scope, tuple(values.split()))


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
