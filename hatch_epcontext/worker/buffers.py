"""Compiling from memory to memory, for apps that compile on the user's machine and keep nothing on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import onnx

from hatch_epcontext.errors import BuildError, ConfigError, EpcontextError, Problem
from hatch_epcontext.options import check_options, render_options
from hatch_epcontext.protocol import TargetSpec
from hatch_epcontext.providers import PROVIDERS, Device, OptionValue, find
from hatch_epcontext.structure import suggestion
from hatch_epcontext.worker.compile import compile_buffers, explained
from hatch_epcontext.worker.session import provider_of


def compile_to_bytes(
    model: bytes,
    provider: str,
    provider_options: Mapping[str, OptionValue] | None = None,
    *,
    data: Mapping[str, bytes] | None = None,
    device: Device | None = None,
    optimization: Literal["none", "basic", "extended", "all"] = "basic",
) -> bytes:
    """The context model of ``model``, with the compiled blob inside.

    ``model``: the contents of an ONNX file; ``data``: the contents of the files of its external data, by
    the location under which the model names them. Shapes have to be fixed where the EP needs that.

    Raises ConfigError when the provider does not exist, makes no contexts or does not have these
    options, and BuildError when its EP is not here or compiles nothing.
    """
    known = find(provider)
    if known is None or known.product != "context" or known.needs_library:
        names = [
            name for name, p in PROVIDERS.items() if p.product == "context" and not p.needs_library
        ]
        what = f"{provider!r} is not a provider that makes contexts."
        raise ConfigError(Problem("provider", what, suggestion(provider, names)))
    if problems := list(check_options("compile_to_bytes", provider_options or {}, {}, known)):
        raise ConfigError(*problems)
    target = TargetSpec(
        name=known.name,
        provider=known.name,
        ep=known.ep,
        plugin=known.plugin,
        provider_options=known.complete(render_options(provider_options or {}, known)),
        session_options={},
        load_options={},
        device=device or known.devices[0],
        device_filter={},
        policy=None,
        virtual_devices=False,
        optimization=optimization,
        embed=True,
    )
    try:
        return compile_buffers(model, data or {}, target)
    except EpcontextError:
        raise
    except Exception as error:
        graph = onnx.ModelProto.FromString(model).graph
        if (problem := explained(str(error), provider_of(target), graph)) is None:
            raise
        raise BuildError(problem) from error
