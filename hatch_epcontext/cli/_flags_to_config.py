"""The texts of flags -> plain values for the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.tools.configure import JobSettings

_Texts = Mapping[str, str]


def job_settings(
    *,
    options: _Texts,
    configs: _Texts,
    device: str | None,
    dims: _Texts,
    shapes: _Texts,
    constants: _Texts,
    settings: _Texts,
    inputs: str | None = None,
    optimization: str | None = None,
) -> JobSettings:
    """The settings that flags give; a text that is not a valid value stays as it is, for the checks."""
    return JobSettings(
        provider_options=options,
        session_options=configs,
        device=device,
        optimization=optimization,
        dims=_read(dims, _whole),
        shapes=_read(shapes, _sizes),
        constants=_read(constants, value),
        validate={} if inputs is None else {"inputs": inputs},
        settings=_read(settings, value),
    )


def _read(texts: _Texts, read: Callable[[str], Any]) -> dict[str, Any]:
    return {key: read(text) for key, text in texts.items()}


def _whole(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sizes(text: str) -> Any:
    return [_whole(size.strip()) for size in text.split(",")] if text.strip() else []


def value(text: str) -> Any:
    """``text`` as TOML, or ``text`` itself where it is not TOML."""
    try:
        values = parse(f"value = {text}")
    except ValueError:
        return text
    return values["value"] if len(values) == 1 else text
