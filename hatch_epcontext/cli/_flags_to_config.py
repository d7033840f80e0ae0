"""The texts of flags -> plain values for the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.tools.configure import JobSettings

_Texts = Mapping[str, str]


def job_settings(
    *,
    options: _Texts,
    configs: _Texts,
    device: str | None,
    settings: Iterable[tuple[str, str]],
    dims: _Texts,
    shapes: _Texts,
    constants: _Texts,
    inputs: str | None,
    optimization: str | None = None,
) -> JobSettings:
    """The settings in flags; an invalid value stays text, which the checks reject.

    ``settings``: a key may occur several times. Its tables are merged; of other values the last one counts.
    """
    return JobSettings(
        provider_options=_read(options, _table),
        session_options=configs,
        device=device,
        optimization=optimization,
        dims=_read(dims, _whole),
        shapes=_read(shapes, _sizes),
        constants=_read(constants, value),
        validate={} if inputs is None else {"inputs": inputs},
        settings=_merged(settings),
    )


def _read(texts: _Texts, read: Callable[[str], Any]) -> dict[str, Any]:
    return {key: read(text) for key, text in texts.items()}


def _merged(settings: Iterable[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, text in settings:
        found[key] = _merge(found.get(key), value(text))
    return found


def _merge(first: Any, second: Any) -> Any:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return {**first, **{key: _merge(first.get(key), each) for key, each in second.items()}}


def _whole(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sizes(text: str) -> Any:
    return [_whole(size.strip()) for size in text.split(",")] if text.strip() else []


def _table(text: str) -> Any:
    """``text`` as a table, as messages show it, or ``text`` itself."""
    table = value(text)
    return table if isinstance(table, dict) else text


def value(text: str) -> Any:
    """``text`` as TOML, or ``text`` itself where it is not TOML."""
    try:
        values = parse(f"value = {text}")
    except ValueError:
        return text
    return values["value"] if len(values) == 1 else text
