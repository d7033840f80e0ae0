from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext import providers
from hatch_epcontext.graph.facts import Cost
from hatch_epcontext.providers import (
    DISTRIBUTIONS,
    PROVIDERS,
    Device,
    Option,
    Provider,
    find,
    missing,
)
from hatch_epcontext.providers.base import ProfileOptions
from hatch_epcontext.providers.option import choice

QNN = PROVIDERS["qnn"]
OPENVINO = PROVIDERS["openvino"]
RTX = PROVIDERS["tensorrt-rtx"]


def test_each_module_with_a_provider_is_registered() -> None:
    modules = {module.name for module in pkgutil.iter_modules(providers.__path__)}
    named = {name.replace("-", "_") for name in PROVIDERS}
    # The provider `plugin` is in `generic`.
    assert named == modules - {
        "base",
        "generic",
        "messages",
        "option",
    } | {"plugin"}


def example() -> Provider:
    """The provider that docs/architecture.md shows."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "PROVIDER =" in block
    )
    module: dict[str, Any] = {}
    exec(code, module)
    provider = module["PROVIDER"]
    assert isinstance(provider, Provider)
    return provider


@pytest.mark.parametrize(
    "provider", [*PROVIDERS.values(), example()], ids=lambda provider: provider.name
)
def test_the_facts_of_each_provider_are_complete_and_consistent(provider: Provider) -> None:
    assert set(provider.distributions) <= set(DISTRIBUTIONS)
    assert provider.devices
    assert provider.title
    assert provider.verified
    assert provider.sources or not provider.options
    for device in provider.devices:
        implied = provider.complete(device, {})
        assert not provider.contradictions(device, implied)
        for name, value in implied.items():
            assert provider.options[name].render(value) == value
    # No option is in two tables.
    assert not provider.options.keys() & provider.reserved.keys()
    if provider.profiles:
        assert {*provider.profiles.names} <= provider.reserved.keys()


@pytest.mark.parametrize(
    ("provider", "spellings"),
    [
        ("qnn", ["qnn", "QNNExecutionProvider"]),
        ("tensorrt-rtx", ["NvTensorRtRtxExecutionProvider", "NvTensorRTRTX", "tensorrt_rtx"]),
        ("tensorrt", ["TensorrtExecutionProvider"]),
        ("openvino", ["OpenVINO", "OpenVINOExecutionProvider"]),
        ("directml", ["dml", "DmlExecutionProvider", "DirectML"]),
        ("webgpu", ["WebGPU", "WebGpuExecutionProvider"]),
        ("plugin", ["plugin"]),
        (None, ["", "qn", "tensor", "ExecutionProvider", "OpenVINOExecutionProvider.AUTO"]),
    ],
)  # fmt: skip
def test_onnx_runtimes_names_and_other_spellings_are_known(
    provider: str | None, spellings: list[str]
) -> None:
    for name in spellings:
        assert find(name) is (PROVIDERS[provider] if provider else None)


def test_no_option_is_a_key_or_a_password() -> None:
    named = re.compile("key|passw|token|secret|credential", re.IGNORECASE)
    assert [name for p in PROVIDERS.values() for name in p.options if named.search(name)] == []


def test_no_two_providers_have_the_same_name() -> None:
    for provider in PROVIDERS.values():
        for name in (provider.name, provider.ep):
            assert [p.name for p in PROVIDERS.values() if name and p.has_name(name)] in (
                [provider.name],
                [],
            )


SWITCH, NUMBER, JSON = Option("bool"), Option("int"), Option("json")
VALUES: list[tuple[Option, Any, str]] = [
    (SWITCH, True, "1"),
    (SWITCH, "True", "1"),
    (SWITCH, 0, "0"),
    (NUMBER, 60, "60"),
    (NUMBER, "60", "60"),
    (choice("73 75"), 73, "73"),
    (Option(), "a/path", "a/path"),
    (JSON, {"CPU": {"B": True, "A": 1}}, '{"CPU":{"A":1,"B":true}}'),
    (JSON, '{"CPU": {}}', '{"CPU": {}}'),
]
IMPOSSIBLE: list[tuple[Option, Any, str]] = [
    (SWITCH, "yes", "true or false"),
    (SWITCH, 2, "true or false"),
    (SWITCH, [True], "true or false"),
    (NUMBER, "many", "a whole number"),
    (NUMBER, True, "a whole number"),
    (NUMBER, 1.5, "a whole number"),
    (NUMBER, [60], "a whole number"),
    (NUMBER, "60,57", "a whole number"),
    (Option("int", minimum=2), 1, "a whole number, at least 2"),
    (choice("73 75"), 999, "one of 73, 75"),
    (Option(), 3, "a string"),
    (Option(), {}, "a string"),
    (JSON, "{bad", "a table, or a string of JSON"),
    (JSON, "[1]", "a table, or a string of JSON"),
]


def test_a_simulators_time_is_that_of_nodes_multiply_adds_and_values() -> None:
    cost = Cost(nodes=2_000, multiply_adds=10**9, values=10**7)
    assert QNN.seconds_of_run(cost) == 0.5 + 0.5 + 1
    # A recurrent layer of few multiply-adds takes as long as a large convolution.
    assert QNN.seconds_of_run(Cost(10 * 274, 10**6, 10**5)) > 0.6
    assert OPENVINO.seconds_of_run(cost) == 0


def test_toml_values_become_the_strings_that_eps_take() -> None:
    for option, value, rendered in VALUES:
        assert option.render(value) == rendered
    for option, value, allowed in IMPOSSIBLE:
        with pytest.raises(ValueError, match=allowed):
            option.render(value)


def test_the_backend_follows_from_the_device() -> None:
    assert QNN.complete("npu", {"soc_model": "200"}) == {"backend_type": "htp", "soc_model": "200"}
    assert QNN.complete("gpu", {}) == {"backend_type": "gpu"}


def test_directml_takes_an_adapter_of_the_targets_kind() -> None:
    directml = PROVIDERS["directml"]
    assert directml.complete("gpu", {}) == {}
    assert directml.complete("npu", {}) == {"device_filter": "npu"}
    assert directml.complete("npu", {"device_id": "1"}) == {"device_id": "1"}


def test_coreml_runs_on_the_units_of_the_targets_device_and_keeps_what_it_compiles() -> None:
    options = PROVIDERS["coreml"].complete("npu", {})
    assert options == {
        "ModelFormat": "MLProgram",
        "MLComputeUnits": "CPUAndNeuralEngine",
        "RequireStaticInputShapes": "1",
        "ModelCacheDirectory": "{user-cache}/coreml",
    }
    # The app's machine needs all of them.
    assert PROVIDERS["coreml"].loading(options) == options
    units = {d: PROVIDERS["coreml"].complete(d, {})["MLComputeUnits"] for d in ("gpu", "any")}
    assert units == {"gpu": "CPUAndGPU", "any": "ALL"}


@pytest.mark.parametrize(
    ("provider", "device", "options", "contradicting"),
    [
        ("qnn", "gpu", {"backend_type": "gpu"}, []),
        ("qnn", "gpu", {"backend_type": "htp"}, ["backend_type"]),
        ("qnn", "npu", {"backend_type": "gpu"}, ["backend_type"]),
        ("directml", "npu", {"device_filter": "gpu"}, ["device_filter"]),
        ("directml", "any", {"device_filter": "gpu"}, []),
        ("coreml", "npu", {"MLComputeUnits": "CPUAndGPU"}, ["MLComputeUnits"]),
        ("coreml", "npu", {"MLComputeUnits": "ALL"}, []),
        ("qnn", "npu", {"soc_model": "60", "htp_arch": "73"}, []),
        ("qnn", "npu", {"soc_model": "12345", "htp_arch": "75"}, []),
        ("qnn", "npu", {"soc_model": "60", "htp_arch": "75"}, ["htp_arch"]),
    ],
)
def test_options_for_another_device_contradict_it(
    provider: str, device: Device, options: dict[str, str], contradicting: list[str]
) -> None:
    assert list(PROVIDERS[provider].contradictions(device, options)) == contradicting


ONE = "v2:6:2.51.0:5.51.0:73:60:0:0"
SEVERAL = "v2:6:2.51.0:5.51.0:73,75:60,57:0,0:0"
# The EP writes 0 where `htp_arch` was not set.
UNSET = SEVERAL.replace("73,75", "0,0")


@pytest.mark.parametrize(
    ("compatibility", "options", "disagreement"),
    [
        (ONE, {"htp_arch": "73", "soc_model": "60"}, ""),
        (ONE, {"htp_arch": "0", "soc_model": "60"}, ""),
        (ONE, {"htp_arch": "75"}, "htp_arch = 75 was requested, but the EP compiled for 73"),
        (ONE, {"soc_model": "43"}, "soc_model = 43 was requested, but the EP compiled for 60"),
        (ONE, {"backend_type": "gpu"}, "gpu was requested, but the EP compiled with the backend htp"),
        ("", {"htp_arch": "73"}, ""),
        ("v9:whatever", {"htp_arch": "73"}, ""),
        (SEVERAL, {"soc_model": "60,57", "htp_arch": "73,75"}, ""),
        (SEVERAL, {"soc_model": "57,60"}, "soc_model = 57,60"),
        (SEVERAL, {"soc_model": "60"}, "soc_model = 60"),
        (SEVERAL, {"soc_model": "60,57", "htp_arch": "73,73"}, "htp_arch = 73,73"),
        (UNSET, {"soc_model": "60,57", "htp_arch": "73,75"}, ""),
        (UNSET, {"soc_model": "60,57", "htp_arch": "73,79"}, "htp_arch"),
    ],
)  # fmt: skip
def test_qnns_compatibility_string_is_compared_with_the_options(
    compatibility: str, options: dict[str, str], disagreement: str
) -> None:
    found = QNN.disagreement(compatibility, "", options) or ""
    assert disagreement in found
    assert bool(found) == bool(disagreement)


def test_qnn_contexts_run_where_the_simulator_runs() -> None:
    assert QNN.runs_on("linux", "x86_64")
    assert QNN.runs_on("win32", "AMD64")
    assert not QNN.runs_on("linux", "aarch64")
    assert not QNN.runs_on("darwin", "x86_64")


def test_the_reason_why_a_provider_cannot_be_installed() -> None:
    assert QNN.unavailable((3, 11), "linux") is None
    assert QNN.unavailable((3, 10), "linux") == "needs Python 3.11 or newer, and this is 3.10"
    assert QNN.unavailable((3, 13), "darwin") == "has no packages for this system, darwin"
    assert PROVIDERS["cpu"].unavailable((3, 10), "darwin") is None


def test_a_compatibility_string_is_read() -> None:
    qnn = QNN.compiled_for("v2:6:2.51.0:5.51.0:73:60:0:0")
    assert qnn == {"soc_model": "60", "htp_arch": "73"}
    # "0" means that the option is not set.
    assert QNN.compiled_for("v2:6:2.51.0:5.51.0:73:0:0:0") == {"htp_arch": "73"}
    assert QNN.compiled_for("") == {}
    assert QNN.compiled_for(SEVERAL) == {"soc_model": "60,57", "htp_arch": "73,75"}
    assert len(QNN.per_chip(QNN.compiled_for(SEVERAL))) == 2
    assert QNN.compiled_for(UNSET) == {"soc_model": "60,57"}
    openvino = OPENVINO.compiled_for(OPENVINO_COMPATIBILITY)
    assert openvino == {"OpenVINO": "2026.4.1", "ISA": "Intel AVX10.1 and Intel AMX"}
    for other in ("", "v2:6", "[]", "{}", '{"ov_compat_string": 3}'):
        assert OPENVINO.compiled_for(other) == {}


OPENVINO_COMPATIBILITY = json.dumps(
    {
        "ovep_ver": "1.8.1",
        "ov_compat_string": "meta=1.0;ov=2026.4.1;isa=Intel AVX10.1 and Intel AMX",
    }
)


def test_openvinos_versions_must_agree() -> None:
    assert OPENVINO.disagreement(OPENVINO_COMPATIBILITY, "2026.4", {}) is None
    assert OPENVINO.disagreement(OPENVINO_COMPATIBILITY, "", {}) is None
    assert OPENVINO.disagreement("", "2026.4", {}) is None
    message = OPENVINO.disagreement(OPENVINO_COMPATIBILITY, "2025.4", {})
    assert message == (
        "the context names OpenVINO 2025.4, but its compatibility string names 2026.4.1"
    )


def test_profiles_are_rendered_as_options() -> None:
    assert RTX.profiles is not None
    image: Mapping[str, tuple[int, ...]] = {"min": (1, 3), "opt": (8, 3), "max": (32, 3)}
    assert RTX.profiles.render([{"images": image}]) == {
        "nv_profile_min_shapes": "images:1x3",
        "nv_profile_opt_shapes": "images:8x3",
        "nv_profile_max_shapes": "images:32x3",
    }
    mask: Mapping[str, tuple[int, ...]] = {"min": (1,), "opt": (8,), "max": (32,)}
    both = {"ids": image, "mask": mask}
    assert RTX.profiles.render([both, both]) == {
        "nv_profile_min_shapes": "ids:1x3,mask:1,ids:1x3,mask:1",
        "nv_profile_opt_shapes": "ids:8x3,mask:8,ids:8x3,mask:8",
        "nv_profile_max_shapes": "ids:32x3,mask:32,ids:32x3,mask:32",
        "nv_multi_profile_enable": "1",
    }
    # TensorRT has no option for several profiles.
    names = {"a_min_shapes", "a_opt_shapes", "a_max_shapes"}
    assert ProfileOptions("a").render([both, both]).keys() == names


def test_tensorrt_writes_context_models_itself() -> None:
    assert PROVIDERS["tensorrt"].own_context_options("/made/a_ctx.onnx", True) == {
        "trt_dump_ep_context_model": "1",
        "trt_ep_context_file_path": "/made/a_ctx.onnx",
        "trt_ep_context_embed_mode": "1",
        "trt_engine_cache_enable": "0",
    }


NOT_THERE = "cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("message", "name", "supplier"),
    [
        (f"Failed to load library /x/libonnxruntime_providers_x.so with error: libcuda.so.1: {NOT_THERE}",
         "libcuda.so.1", "the driver of an NVIDIA GPU"),
        (f"libcudart.so.13: {NOT_THERE}", "libcudart.so.13", "CUDA's libraries"),
        (f"libnvinfer.so.10: {NOT_THERE}", "libnvinfer.so.10", "TensorRT"),
        (f"libcudnn.so.9: {NOT_THERE}", "libcudnn.so.9", "cuDNN"),
        (f"error: libatomic.so.1: {NOT_THERE}", "libatomic.so.1", "libatomic1 (Debian"),
        (f"libof_mine.so: {NOT_THERE}", "libof_mine.so", "apt-file search libof_mine.so "),
        ('LoadLibrary failed with error 126 "No module." when trying to load "C:\\x y\\QnnHtp.dll"',
         "QnnHtp.dll", "the package of the QNN execution provider"),
    ],
)  # fmt: skip
def test_the_supplier_of_a_missing_library(message: str, name: str, supplier: str) -> None:
    found = missing(message)
    assert found is not None
    assert found.name.startswith(name)
    assert supplier in found.advice
    assert found.is_driver == ("driver" in supplier)


def declared(header: str) -> Mapping[str, str]:
    """The type of each option in a C++ header, from the comments."""
    options = header.split("namespace provider_option_names")[1].split(
        "}  // namespace", maxsplit=1
    )[0]
    found = {}
    for comment, name in re.findall(
        r'((?:///[^\n]*\n)+)constexpr const char\* k\w+ = "(\w+)";', options
    ):
        lines = [line.removeprefix("///").strip() for line in comment.splitlines()]
        found[name] = lines[lines.index("@par Type") + 1]
    return found


def test_tensorrt_rtxs_options_are_those_of_its_package() -> None:
    spec = importlib.util.find_spec("onnxruntime_ep_nv_tensorrt_rtx")
    if spec is None or spec.origin is None:
        pytest.skip("onnxruntime-ep-nv-tensorrt-rtx has no wheels for this platform")
    header = Path(spec.origin).with_name("tensorrt_rtx_provider_options.h").read_text("utf-8")
    in_header = declared(header)
    assert len(in_header) > 20
    # `device_id` is ONNX Runtime's own, for all EPs with devices: it is only in the documentation.
    assert RTX.options.keys() | RTX.reserved.keys() >= in_header.keys() | {"device_id"}
    assert RTX.options.keys() <= in_header.keys() | {"device_id"}
    kinds = {"Boolean": "bool", "Integer": "int", "String": "text"}
    for name in in_header.keys() - RTX.reserved.keys():
        assert RTX.options[name].kind == kinds[in_header[name]], name
    (targets,) = re.findall(r"kTargetSMValues\[\] = \{(.*?)\}", header)
    assert RTX.options["nv_target_sm"].choices == tuple(re.findall(r'"(\w+)"', targets))


def library_of(module: str) -> bytes:
    """The bytes of the plugin library in the package ``module``."""
    found = importlib.util.find_spec(module)
    if found is None:
        pytest.skip(f"{module} has no wheels for this Python or platform")
    return Path(importlib.import_module(module).get_library_path()).read_bytes()


@pytest.mark.parametrize("provider", ["openvino", "qnn"])
def test_the_names_of_options_are_in_the_library(provider: str) -> None:
    known = PROVIDERS[provider]
    assert known.plugin is not None
    library = library_of(known.plugin.module)
    assert [name for name in known.options if name.encode() not in library] == []


@pytest.mark.parametrize(
    ("options", "chips"),
    [
        ({}, [{}]),
        ({"vtcm_mb": "8", "backend_type": "htp"}, [{}]),
        ({"soc_model": "60"}, [{"soc_model": "60"}]),
        (
            {"soc_model": "60,57", "htp_arch": "73,75", "vtcm_mb": "8"},
            [{"soc_model": "60", "htp_arch": "73"}, {"soc_model": "57", "htp_arch": "75"}],
        ),
    ],
)
def test_each_chip_has_its_options(options: dict[str, str], chips: list[dict[str, str]]) -> None:
    assert list(QNN.per_chip(options)) == chips


def test_what_a_context_is_for_is_said_by_name_if_each_chip_has_one() -> None:
    for provider in PROVIDERS.values():
        for name, chip in provider.chips.items():
            assert not chip.source or provider.describe(chip.facts) == name
    assert QNN.describe({"soc_model": "60"}) == "snapdragon-x-elite"
    several = {"soc_model": "60,57", "htp_arch": "73,75"}
    assert QNN.describe(several) == "snapdragon-x-elite, snapdragon-8-gen-3"
    for unknown in ("htp_arch 73", "soc_model 60, htp_arch 75", "soc_model 60,200"):
        facts = dict(pair.split() for pair in unknown.split(", "))
        assert QNN.describe(facts) == unknown
    rtx, gpus = PROVIDERS["tensorrt-rtx"], "compute capability"
    facts = {gpus: "8.6, 12.0", "TensorRT RTX": "1.7.1.116"}
    assert rtx.describe(facts) == "rtx-30, rtx-50, TensorRT RTX 1.7.1.116"
    assert rtx.describe({gpus: "8.0, 8.6"}) == f"{gpus} 8.0, 8.6"
    assert QNN.describe({}) == ""


def test_the_options_of_a_chip_are_those_that_its_name_sets() -> None:
    for provider in PROVIDERS.values():
        named = provider.facts_of(provider.chips).keys() & provider.options.keys()
        assert named <= provider.chip_options <= provider.options.keys()


@pytest.mark.parametrize(
    ("options", "is_missing"),
    [
        ({}, True),
        ({"soc_model": "0"}, True),
        ({"soc_model": "88"}, False),
        ({"htp_arch": "73"}, False),
        ({"backend_type": "gpu"}, False),
    ],
)
def test_a_missing_chip_is_a_warning(options: dict[str, str], is_missing: bool) -> None:
    warning = QNN.missing_chip(QNN.complete("npu", options))
    assert (warning is not None and "snapdragon-x-elite" in warning) == is_missing


def test_the_architectures_of_chips_follow_unless_they_are_set() -> None:
    assert QNN.complete("npu", {"soc_model": "60"})["htp_arch"] == "73"
    assert QNN.complete("npu", {"soc_model": "60", "htp_arch": "0"})["htp_arch"] == "0"
    assert QNN.complete("npu", {"soc_model": "57,60"})["htp_arch"] == "75,73"
    assert QNN.complete("npu", {"soc_model": "57,200", "htp_arch": "75,81"})["htp_arch"] == "75,81"
    for socs in ("200", "60,200", "0", "0,0"):
        assert "htp_arch" not in QNN.complete("npu", {"soc_model": socs})
