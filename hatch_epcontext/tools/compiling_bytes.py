"""Compiles from memory to memory, for apps that compile on the user's machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hatch_epcontext.errors import ConfigError, Key, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import ONNX_RUNTIME, check_environment
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, find
from hatch_epcontext.text import show, suggestion
from hatch_epcontext.tools.configure import configure, nested
from hatch_epcontext.tools.inspecting import READING
from hatch_epcontext.worker.requests import CompileRequest

_REQUIREMENTS = (f"{DISTRIBUTIONS[0]}{ONNX_RUNTIME}", *READING)
"""The requirements to compile a model without preparing it."""


def compile_to_bytes(
    model: bytes, data: Mapping[str, bytes], provider: str, settings: Mapping[str, Any]
) -> bytes:
    """Compile a model from memory to memory, as `hatch_epcontext.api.compile_to_bytes` describes."""
    able = [p for p in PROVIDERS.values() if p.product == "context" and not p.needs_library]
    if find(provider) not in able:
        message = f"{show(provider)} is not a provider that compiles contexts."
        hint = suggestion(provider, [known.name for known in able])
        raise ConfigError(Problem.at(Key() / "provider", Kind.UNKNOWN_PROVIDER, message, hint))
    with temp_dir() as folder:
        source, result = folder / "model.onnx", folder / "result"
        source.write_bytes(model)
        result.mkdir()
        config = configure({"model": source}, provider, nested(settings, {"from-memory": True}))
        (target,) = config.targets
        check_environment((), _REQUIREMENTS)
        files = {}
        for number, (location, contents) in enumerate(data.items()):
            # Not named after its location, which can be a path.
            file = folder / f"data-{number}"
            file.write_bytes(contents)
            files[location] = str(file)
        paths = (str(source),)
        request = CompileRequest(config.models, paths, target, str(result), buffers=files)
        workers = Workers(config.build.timeout)
        workers.call(request, folder / "worker", location=f"model -> {target.name}")
        (compiled,) = result.iterdir()
        return compiled.read_bytes()
