"""Checks of provider options and session options: ONNX Runtime and its EPs check neither."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.tables import TargetTable
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.files import is_portable
from hatch_epcontext.providers import OptionValue, Provider, render
from hatch_epcontext.shipped import USER_CACHE
from hatch_epcontext.text import listing, near_name, show, suggestion

_ABSOLUTE = re.compile(r':\s*"((?:[/\\]|[A-Za-z]:[/\\]|{user-cache})[^"]*)"')
"""A value in JSON that is an absolute path, or one that the loader replaces where nothing else is."""


def check_options(key: Key, table: TargetTable, provider: Provider) -> Iterator[Problem]:
    """The options of the target at ``key``."""
    load_options, unchecked = table.load_options, bool(table.allow_unknown_options)
    yield from _check_session_options(key, table.session_options, unchecked=unchecked)
    for name, value in load_options.items():
        if isinstance(value, str) and USER_CACHE in value:
            first, _, below = value.partition("/")
            if first != USER_CACHE or (below and not is_portable(below)):
                option_key = key / "load-options" / name
                message = f"must be a folder in {USER_CACHE}, not {show(value)}."
                example = Setting(option_key, f"{USER_CACHE}/{name}")
                yield Problem.at(option_key, Kind.INVALID_OPTION, message, "For example:", example)
    if unchecked or provider.needs_library:
        return
    allowed = Setting(key / "allow-unknown-options", True)
    yield from _check_values(key / "provider-options", table.provider_options, provider, allowed)
    yield from _check_values(key / "load-options", load_options, provider, allowed)
    for name, value in load_options.items():
        if name in provider.options and provider.options[name].scope == "compile":
            yield Problem.at(
                key / "load-options" / name,
                Kind.NOT_APPLICABLE,
                "counts only when the model is compiled.",
                "Move it to provider-options.",
                Setting(key / "provider-options" / name, value),
            )


def _check_values(
    key: Key, options: Mapping[str, OptionValue], provider: Provider, unchecked: Setting
) -> Iterator[Problem]:
    for name, value in options.items():
        option_key = key / name
        if name in provider.reserved:
            message = f"cannot be set: {provider.reserved[name]}."
            yield Problem.at(option_key, Kind.RESERVED_OPTION, message)
            continue
        option = provider.options.get(name)
        if option is None:
            message = f"is not an option of the {provider.name} provider."
            hint = f"{suggestion(name, sorted(provider.options))}\n{_NEWER}".lstrip()
            yield Problem.at(option_key, Kind.UNKNOWN_OPTION, message, hint, unchecked)
            continue
        try:
            rendered = option.render(value)
        except ValueError as allowed:
            message = f"must be {allowed}, not {show(value)}."
            advice = _advice(option_key, value, provider, unchecked)
            yield Problem.at(option_key, Kind.INVALID_OPTION, message, *advice)
            continue
        if option.kind == "json" and (path := _ABSOLUTE.search(rendered)):
            message = f"has the path {show(path[1])}, and the app has paths of its own."
            hint = "Leave it out. The app can set it: load(..., provider_options={...})."
            yield Problem.at(option_key, Kind.INVALID_OPTION, message, hint)


def _advice(
    key: Key, value: OptionValue, provider: Provider, unchecked: Setting
) -> tuple[str, Setting]:
    """What to do about a wrong ``value`` of the option at ``key``: name the chip, if that sets it."""
    *target, _, option = key.parts
    names = {
        chip.facts[str(option)]: name
        for name, chip in provider.chips.items()
        if option in chip.facts
    }
    # An architecture is that of several chips.
    if not names or len(names) < len(provider.chips):
        return _NEWER, unchecked
    text = render(value)
    if text.isdecimal():
        nearest = sorted(names, key=lambda number: abs(int(number) - int(text)))[:3]
        shown = listing(f"{number} ({names[number]})" for number in nearest)
        return f"The nearest: {shown}.\n{_NEWER}", unchecked
    hint = f"{near_name(text, provider.chips) or ''} Name the chip, or a list of chips:".lstrip()
    return hint, Setting(Key((*target, "chip"), key.model, key.name))


_NEWER = "If the EP is newer than this package:"


def _check_session_options(
    target: Key, options: Mapping[str, OptionValue], *, unchecked: bool
) -> Iterator[Problem]:
    if not options:
        return
    # Read here, because few targets set any.
    known = parse(Path(__file__).with_name("session_options.toml").read_text(encoding="utf-8"))
    key, reserved = target / "session-options", known["reserved"]
    for name, value in options.items():
        if name in reserved:
            message = f"cannot be set: {reserved[name]}."
            yield Problem.at(key / name, Kind.RESERVED_OPTION, message)
        elif isinstance(value, Mapping | Sequence) and not isinstance(value, str):
            message = (
                f"must not be a {'table' if isinstance(value, Mapping) else 'list'}: {show(value)}."
            )
            yield Problem.at(key / name, Kind.WRONG_TYPE, message)
        elif name not in known["settable"] and not unchecked:
            silent = "ONNX Runtime would accept it and silently ignore it."
            near = near_name(name, known["settable"])
            yield Problem.at(
                key / name,
                Kind.UNKNOWN_OPTION,
                "is not a session option of ONNX Runtime.",
                f"{near or ''} {silent}\nIf ONNX Runtime is newer than this package:".lstrip(),
                Setting(target / "allow-unknown-options", True),
            )


def render_options(
    options: Mapping[str, OptionValue], provider: Provider | None = None, *, unchecked: bool = False
) -> dict[str, str]:
    """Options as the strings that ONNX Runtime reads.

    Options that `check_options` rejects are left out, or kept with ``unchecked``.
    """
    rendered = {}
    for name, value in options.items():
        option = provider.options.get(name) if provider else None
        try:
            rendered[name] = option.render(value) if option else render(value)
        except ValueError:
            if unchecked:
                rendered[name] = render(value)
    return rendered
