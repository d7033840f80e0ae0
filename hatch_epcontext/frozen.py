"""Frozen dataclasses that are cheap to define, for modules that every build imports.

Such a process defines about a hundred of them, and Python writes and compiles six methods for each. Here all
classes share them. That they are frozen, type checkers say.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414, exported
else:

    def dataclass(*, frozen: bool, kw_only: bool = False) -> Any:
        """As that of `dataclasses`, for classes that are ``frozen``."""
        assert frozen

        def define(cls: type[Any]) -> type[Any]:
            made = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            made.__init__, made.__repr__, made.__eq__, made.__hash__ = _init, _repr, _eq, _hash
            return made

        return define


def _init(self: Any, *values: Any, **given: Any) -> None:
    fields = dataclasses.fields(self)
    positional = [each.name for each in fields if not each.kw_only]
    if len(values) > len(positional) or given.keys() & positional[: len(values)]:
        raise TypeError(f"{type(self).__name__} has other fields: {', '.join(positional)}")
    given.update(zip(positional, values, strict=False))
    for each in fields:
        if each.name in given:
            value = given.pop(each.name)
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
        elif each.default is not dataclasses.MISSING:
            value = each.default
        else:
            raise TypeError(f"{type(self).__name__} needs {each.name}")
        self.__dict__[each.name] = value
    if given:
        raise TypeError(f"{type(self).__name__} has no {', '.join(given)}")
    if post_init := getattr(self, "__post_init__", None):
        post_init()


def _compared(instance: Any) -> tuple[Any, ...]:
    fields = dataclasses.fields(instance)
    return tuple(getattr(instance, each.name) for each in fields if each.compare)


def _eq(self: Any, other: object) -> Any:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _repr(self: Any) -> str:
    shown = (each.name for each in dataclasses.fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"
