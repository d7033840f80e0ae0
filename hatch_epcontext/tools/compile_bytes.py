"""Compiles from memory to memory, for apps that compile on the user's machine."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.build.requirements import ONNX_RUNTIME, check_environment
from hatch_epcontext.config.checks.options import check_options, render_options
from hatch_epcontext.config.settings import CompileSettings, Optimization
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.ipc.protocol import CompileBytesRequest, TargetSpec
from hatch_epcontext.providers import (
    DISTRIBUTIONS,
    PROVIDERS,
    Device,
    OptionValue,
    Provider,
    find,
)
from hatch_epcontext.text import show, suggestion
from hatch_epcontext.tools.inspect import READING
from hatch_epcontext.tools.temporary import temp_dir

REQUIREMENTS = (f"{DISTRIBUTIONS[0]}{ONNX_RUNTIME}", *READING)
"""The requirements to compile a model that needs no preparation."""


def compile_to_bytes(
    model: bytes,
    provider: str,
    provider_options: Mapping[str, OptionValue] | None = None,
    *,
    data: Mapping[str, bytes] | None = None,
    device: Device | None = None,
    optimization: Optimization = "basic",
    timeout: float = 1800.0,
) -> bytes:
    """Compile a model from memory to memory, as `hatch_epcontext.api.compile_to_bytes` describes."""
    known = _provider_with_contexts(provider)
    options = provider_options or {}
    if problems := list(check_options(Key(), options, {}, known, Key())):
        raise ConfigError(*problems)
    check_environment((), REQUIREMENTS)
    settings = CompileSettings(
        provider=known.name,
        ep=known.ep,
        registration_name=known.plugin.registration_name if known.plugin else None,
        provider_options=known.complete(render_options(options, known)),
        device=device or known.devices[0],
        optimization=optimization,
        embed=True,
        in_memory=True,
    )
    with temp_dir() as folder:
        source, result = folder / "model.onnx", folder / "model_ctx.onnx"
        source.write_bytes(model)
        files = {}
        for number, (location, contents) in enumerate((data or {}).items()):
            # Not under its location, which can be a path.
            file = folder / f"data-{number}"
            file.write_bytes(contents)
            files[location] = str(file)
        target = TargetSpec(known.name, settings, known.plugin)
        request = CompileBytesRequest(str(source), files, target, str(result))
        Workers(timeout).call(request, folder / "worker", location=f"model -> {known.name}")
        return result.read_bytes()


def _provider_with_contexts(name: str) -> Provider:
    found = find(name)
    if found is not None and _makes_contexts(found):
        return found
    message = f"{show(name)} is not a provider that compiles contexts."
    names = [name for name, provider in PROVIDERS.items() if _makes_contexts(provider)]
    problem = Problem.at(
        Key() / "provider", Kind.UNKNOWN_PROVIDER, message, suggestion(name, names)
    )
    raise ConfigError(problem)


def _makes_contexts(provider: Provider) -> bool:
    return provider.product == "context" and not provider.needs_library
