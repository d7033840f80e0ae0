"""Packages written by hand, and what tests of their loader share."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from hatch_epcontext import _check, _recompile, _runner, _user_cache
from hatch_epcontext.files import record_files
from hatch_epcontext.package.bundle import loader_file
from hatch_epcontext.package.manifest import UNSEALED, seal
from hatch_epcontext.shipped import METADATA
from tests.conftest import printed_json
from tests.models import network, save

CPU_EP = "CPUExecutionProvider"

QNN_EP = "QNNExecutionProvider"

OPENVINO_EP = "OpenVINOExecutionProvider"

X = {"x": np.ones((1, 1, 8, 8), np.float32)}

Table = dict[str, Any]


def variant(
    folder: str, file: str, *, session_options: Mapping[str, str] | None = None, **ours: Any
) -> Table:
    """A variant as the build writes it; ``ours`` is added to its metadata."""
    settings = {
        "ep": CPU_EP,
        "device": "cpu",
        "session_options": {},
        "provider_options": {},
        "optimization": "basic",
        "embed": False,
        **ours.pop("settings", {}),
    }
    about = {
        "product": "optimized",
        "plugin": None,
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 1, 8, 8]}],
        "settings": settings,
        "load_options": {},
        "needs_device": False,
        "prepared": None,
        "group": None,
        **ours,
    }
    device = settings["device"]
    return {
        "variant_directory": folder,
        "ep": settings["ep"],
        **({"device": device} if device in ("npu", "gpu") else {}),
        "executor_info": {
            "ort": {
                "model_file": file,
                "session_options": dict(session_options or {}),
                "provider_options": {},
            }
        },
        "additional_metadata": {METADATA: about},
    }


def source_of(folder: str, file: str, shape: list[int | str]) -> Table:
    inputs = [{"name": "x", "dtype": "float32", "shape": shape}]
    return {
        "variant_directory": folder,
        "ep": CPU_EP,
        "executor_info": {"ort": {"model_file": file}},
        "additional_metadata": {METADATA: {"product": "source", "inputs": inputs}},
    }


def component(variants: Mapping[str, Table], name: str = "a", **ours: Any) -> Table:
    about = {"model": name, "identity": "", **ours}
    return {"variants": dict(variants), "additional_metadata": {METADATA: about}}


CPU = variant("a/cpu", "a_optimized.onnx", session_options={"session.intra_op_num_threads": "1"})

NPU = variant(
    "a/npu",
    "a_ctx.onnx",
    session_options={"session.disable_model_compile": "1"},
    product="context",
    plugin={"module": "no_such_ep", "package": "no-such-ep", "registration_name": "Some"},
    settings={"ep": "SomeExecutionProvider", "device": "npu"},
)

SOURCE = source_of("a/source", "a.onnx", ["batch", 1, 8, 8])


def changed(table: Table, **ours: Any) -> Table:
    """A copy of a variant with some of its metadata replaced; ``settings`` are added to those it has."""
    result = copy.deepcopy(table)
    about = result["additional_metadata"][METADATA]
    about["settings"] = {**about["settings"], **ours.pop("settings", {})}
    about.update(ours)
    return result


QNN = changed(
    {**NPU, "ep": QNN_EP},
    plugin={
        "module": "onnxruntime_qnn",
        "package": "onnxruntime-qnn",
        "registration_name": QNN_EP,
    },
    prepared="prepared/a.onnx",
    settings={
        "ep": QNN_EP,
        "provider_options": {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"},
    },
)

QNN["executor_info"]["ort"]["provider_options"] = {"backend_type": "htp"}


def import_copy(file: Path) -> Any:
    """The loader as the module ``shipped``, whose file is ``file``."""
    module = ModuleType("shipped")
    module.__file__ = str(file)
    # Where `_recompile` is: coverage counts for the original.
    module.__package__ = "hatch_epcontext"
    sys.modules["shipped"] = module
    run_as(module)
    return module


def run_as(module: ModuleType) -> None:
    """Run the loader as ``module``, under the name of the original file, so that coverage counts for it."""
    exec(compile(loader_file().read_text("utf-8"), str(loader_file()), "exec"), vars(module))


def sealed(text: str) -> str:
    """The text of a manifest with its own sha256, where it has a place for that."""
    unsealed = re.sub(r'("manifest_sha256": )"[0-9a-f]{64}"', rf'\1"{UNSEALED}"', text)
    return seal(unsealed) if UNSEALED in unsealed else text


class Shipper:
    """Writes a package by hand, into the folder ``shipped``, and imports its loader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "shipped"

    def __call__(self, source: Table | None = SOURCE, **variants: Table) -> Any:
        """A package with the model ``a``, its variants, and its source last."""
        if source is not None:
            variants = {**variants, "source": source}
        return self.write({"a": component(variants)})

    def write(
        self, components: Mapping[str, Any], companions: Mapping[str, str] | None = None, **top: Any
    ) -> Any:
        """A package with these components and ``companions``; ``top`` replaces keys of the manifest."""
        for file in ("a/source/a.onnx", "a/cpu/a_optimized.onnx", "a/npu/a_ctx.onnx"):
            if not (self.folder / file).is_file():
                save(network(), self.folder / file)
        (self.folder / "__init__.py").write_bytes(loader_file().read_bytes())
        for module in (_check, _recompile, _runner, _user_cache):
            shutil.copy(str(module.__file__), self.folder)
        files = {
            name: {"size": each.size, "sha256": each.sha256}
            for name, each in record_files(self.folder).items()
            if name != "manifest.json"
        }
        about = {
            "generator": "hatch-epcontext 0",
            "files": files,
            "companions": dict(companions or {}),
            "manifest_sha256": UNSEALED,
        }
        manifest = {
            "schema_version": "1.0",
            "layout": "portable",
            "components": dict(components),
            "additional_metadata": {METADATA: about},
            **top,
        }
        self.manifest(manifest)
        return import_copy(self.folder / "__init__.py")

    def manifest(self, content: Any) -> None:
        """Write the manifest, which is a text, or sealed values as the build writes them."""
        text = content if isinstance(content, str) else sealed(json.dumps(content))
        self.folder.mkdir(exist_ok=True)
        (self.folder / "manifest.json").write_text(text, encoding="utf-8")

    def script(self, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
        """What ``script`` prints last as JSON, in a process that can import ``shipped``."""
        return self.finish(self.start(script, *arguments, env=env))

    def start(
        self, script: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=self.root,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def finish(self, process: subprocess.Popen[str]) -> Any:
        try:
            output, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, errors
        return printed_json(output)


def outcomes(attempts: list[Any]) -> list[tuple[str, str]]:
    return [(attempt.target, attempt.outcome) for attempt in attempts]


def device(kind: str, vendor: str = "Some", **metadata: str) -> SimpleNamespace:
    hardware = SimpleNamespace(
        type=SimpleNamespace(name=kind), vendor=vendor, vendor_id=1, device_id=2, metadata={}
    )
    return SimpleNamespace(ep_name="SomeExecutionProvider", ep_metadata=metadata, device=hardware)


def only_variant(app: Any, target: str = "npu") -> Any:
    (found,) = (each for each in app._package(None).models["a"] if each.target == target)
    return found


def opener(app: Any, target: str = "npu", **request: Any) -> Any:
    given = {"shapes": {}, "provider_options": {}, **request}
    return app.Opener(only_variant(app, target), app.Request(**given))


def damage(path: Path, how: str = "altered") -> None:
    """Damage a file; ``altered`` keeps its size."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "truncated":
        path.write_bytes(content[:-10])
    elif how == "longer":
        path.write_bytes(content + b"x")
    else:
        path.write_bytes(bytes(byte ^ 0xFF for byte in content))


def plugin_of(module: str) -> Table:
    return {"module": module, "package": "x", "registration_name": "x"}


OUTSIDE = "is outside of the package"
