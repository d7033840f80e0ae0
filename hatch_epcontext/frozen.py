"""Frozen dataclasses that are cheap to define, for modules that every build imports.

A build defines about a hundred of them, and Python generates and compiles six methods for each. Here all
classes share the methods. Type checkers ensure that they are frozen.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414, exported
else:

    def dataclass(*, frozen: bool, kw_only: bool = False) -> Any:
        """As that of `dataclasses`, for classes that are ``frozen``."""
        assert frozen

        def define(cls: type[Any]) -> type[Any]:
            # In annotations that are text Python looks for markers such as ClassVar, half of its time.
            annotations = vars(cls).get("__annotations__", {})
            cls.__annotations__ = dict.fromkeys(annotations, object)
            defined = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            cls.__annotations__ = annotations
            for name, annotation in annotations.items():
                defined.__dataclass_fields__[name].type = annotation
            defined.__init__, defined.__repr__ = _init, _repr
            defined.__eq__, defined.__hash__ = _eq, _hash
            defined._fields = _Fields(defined)
            return defined

        return define


def types_of(cls: type[Any]) -> dict[str, Any]:
    """The types of the fields of a dataclass, as `typing.get_type_hints`, which takes three times as long."""
    modules = {
        name: base.__module__
        for base in reversed(cls.__mro__)
        for name in vars(base).get("__annotations__", ())
    }
    return {
        item.name: _evaluated(str(item.type), modules[item.name])
        for item in dataclasses.fields(cls)
    }


@functools.cache
def _evaluated(annotation: str, module: str) -> Any:
    return eval(annotation, vars(sys.modules[module]))  # noqa: S307, our own text


def _init(self: Any, *values: Any, **named: Any) -> None:
    fields, own = self._fields, self.__dict__
    # `dataclasses.replace` names all.
    if values or len(named) < len(fields.names):
        own.update(fields.defaults)
        for name, factory in fields.factories:
            own[name] = factory()
        own.update(zip(fields.positional, values, strict=False))
    own.update(named)
    twice = named.keys() & fields.positional[: len(values)] if values and named else ()
    if twice or own.keys() != fields.names.keys() or len(values) > len(fields.positional):
        wrong = twice or own.keys() ^ fields.names.keys()
        text = f"{type(self).__name__} has the fields {', '.join(fields.names)}"
        raise TypeError(f"{text}; wrong or missing: {', '.join(sorted(wrong)) or 'one too many'}")
    if fields.has_post_init:
        self.__post_init__()


class _Fields:
    """The facts of a class that `_init` needs."""

    def __init__(self, cls: type[Any]) -> None:
        fields, missing = dataclasses.fields(cls), dataclasses.MISSING
        self.names = dict.fromkeys(item.name for item in fields)
        self.compared = attrgetter("__class__", *(item.name for item in fields if item.compare))
        self.positional = [item.name for item in fields if not item.kw_only]
        self.defaults = {item.name: item.default for item in fields if item.default is not missing}
        factories = ((item.name, item.default_factory) for item in fields)
        self.factories = [(name, factory) for name, factory in factories if factory is not missing]
        self.has_post_init = hasattr(cls, "__post_init__")


def _eq(self: Any, other: object) -> Any:
    compared = self._fields.compared
    return compared(self) == compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._fields.compared(self))


def _repr(self: Any) -> str:
    shown = (item.name for item in dataclasses.fields(self) if item.repr)
    return f"{type(self).__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"
