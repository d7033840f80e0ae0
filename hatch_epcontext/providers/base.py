"""The vocabulary in which knowledge about execution providers (EPs) is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Scalar = bool | int | float | str
Product = Literal["context", "optimized"]
Device = Literal["npu", "gpu", "cpu", "any"]


@dataclass(frozen=True)
class Option:
    """One provider option, as TOML writes it and as the EP reads it.

    ``scope`` says where the option counts: ``"compile"`` when the artifact is made, ``"load"`` when
    a session is opened, ``"both"`` for the two. An option of scope ``"compile"`` is not shipped.
    """

    kind: Literal["bool", "int", "text"] = "text"
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    scope: Literal["compile", "load", "both"] = "compile"

    @property
    def allowed(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind == "int":
            bounds = [f"at least {self.minimum}"] if self.minimum is not None else []
            bounds += [f"at most {self.maximum}"] if self.maximum is not None else []
            return " ".join(["a whole number", *bounds])
        return {"bool": "true or false", "text": "a string"}[self.kind]

    def render(self, value: Scalar) -> str:
        """The string that the EP wants for ``value``.

        Raises ValueError with what is allowed, because EPs take impossible values in silence.
        """
        text = render(value)
        fits = text in self.choices if self.choices else self._fits(value, text)
        if not fits:
            raise ValueError(self.allowed)
        return text

    def _fits(self, value: Scalar, text: str) -> bool:
        if self.kind == "bool":
            return text in ("0", "1")
        if self.kind == "int":
            if isinstance(value, bool) or not re.fullmatch(r"-?\d+", text):
                return False
            number = int(text)
            return (self.minimum is None or number >= self.minimum) and (
                self.maximum is None or number <= self.maximum
            )
        return isinstance(value, str)


def render(value: Scalar) -> str:
    """A TOML scalar as the string that ONNX Runtime wants: ``true`` becomes ``"1"``."""
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Plugin:
    """An EP that comes as a library of its own, in a package with ``get_library_path()``."""

    module: str
    package: str
    registration_name: str


@dataclass(frozen=True)
class Tolerance:
    """How far a target's outputs may be from those of the CPU EP.

    An output passes when ``|out - ref| <= atol * max(1, max|ref|) + rtol * |ref|`` holds everywhere
    and the cosine similarity of the flattened output with its reference is at least ``cosine``. That
    is not asked of an output whose error is, on the average, below a hundredth of the first term.
    """

    rtol: float
    atol: float
    cosine: float


def _nothing_wrong(options: Mapping[str, str]) -> dict[str, str]:
    return {}


def _nothing_to_compare(compatibility: str, options: Mapping[str, str]) -> str:
    return ""


def _everywhere(system: str, machine: str) -> bool:
    return True


@dataclass(frozen=True)
class Provider:
    """What the package knows of one execution provider.

    A provider is added by adding a module to this package that holds one, named ``PROVIDER``.
    """

    name: str
    """As it is written in ``provider = "..."``."""

    ep: str
    """ONNX Runtime's name of the EP."""

    product: Product
    """``"context"``: models become EP-context models. ``"optimized"``: the EP compiles nothing
    ahead of time, and what can be shipped is ONNX Runtime's optimized graph."""

    flavours: tuple[str, ...]
    """ONNX Runtime distributions that the EP runs on, best first. They share one import package, so
    an environment can hold only one of them."""

    devices: tuple[Device, ...]
    """What the EP runs on; the first is what the loader looks for by default."""

    tolerance: Tolerance
    """The default, which suits the precision in which the EP computes."""

    requirements: tuple[str, ...] = ()
    """What to install beside ONNX Runtime."""

    python: tuple[int, int] = (3, 10)
    """The oldest Python for which ``requirements`` have wheels."""

    systems: tuple[str, ...] = ()
    """The ``sys.platform`` for which ``requirements`` have wheels; empty for all."""

    plugin: Plugin | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Provider options that are filled in; a default gives way to an option that excludes it."""

    exclusive: tuple[frozenset[str], ...] = ()
    """Sets of options of which at most one may be given."""

    static_shapes: bool = False
    """Whether the EP leaves nodes with open dimensions to the CPU."""

    contradictions: Callable[[Mapping[str, str]], dict[str, str]] = _nothing_wrong
    """What is wrong between options, each as option -> message."""

    disagreement: Callable[[str, Mapping[str, str]], str] = _nothing_to_compare
    """How a compatibility string disagrees with the options that were asked for; "" if it does not."""

    runs_on: Callable[[str, str], bool] = _everywhere
    """Whether a context that was compiled for any of its chips can be run on a host of this
    ``sys.platform`` and ``platform.machine()``, if only by simulation."""

    def complete(self, options: Mapping[str, str]) -> dict[str, str]:
        """``options`` with the defaults filled in."""
        excluded = {
            name
            for group in self.exclusive
            if not group.isdisjoint(options)
            for name in group - options.keys()
        }
        return {**{k: v for k, v in self.defaults.items() if k not in excluded}, **options}

    def loading(self, options: Mapping[str, str]) -> dict[str, str]:
        """Those of ``options`` that a session needs when it opens the artifact."""
        return {
            name: value
            for name, value in options.items()
            if name not in self.options or self.options[name].scope != "compile"
        }

    def unavailable(self, python: tuple[int, int], system: str) -> str:
        """Why ``requirements`` cannot be installed on a Python and a ``sys.platform``; "" if they can."""
        if python < self.python:
            wanted, found = (".".join(map(str, version)) for version in (self.python, python))
            return f"needs Python {wanted} or newer, and this is {found}"
        if self.systems and system not in self.systems:
            return f"has no packages for this system, {system}"
        return ""
