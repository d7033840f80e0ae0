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
from hatch_epcontext.providers import FLAVOURS, PROVIDERS, Option, Provider, find, missing, render
from hatch_epcontext.providers.base import ProfileOptions
from hatch_epcontext.providers.option import choice, number, pointer, switch, text
from hatch_epcontext.structure import from_json, to_json

QNN = PROVIDERS["qnn"]
OPENVINO = PROVIDERS["openvino"]
RTX = PROVIDERS["tensorrt-rtx"]


def test_a_provider_is_registered_by_its_module_alone() -> None:
    modules = {module.name for module in pkgutil.iter_modules(providers.__path__)}
    named = {name.replace("-", "_") for name in PROVIDERS}
    assert named == modules - {"base", "libraries", "option"}


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=lambda provider: provider.name)
def test_what_every_provider_has_to_say(provider: Provider) -> None:
    assert set(provider.flavours) <= set(FLAVOURS)
    assert provider.devices
    assert provider.title
    assert provider.verified
    assert provider.sources or not provider.options
    assert provider.defaults.keys() <= provider.options.keys()
    assert all(group <= provider.options.keys() for group in provider.exclusive)
    for name, value in provider.defaults.items():
        assert provider.options[name].render(value) == value
    # A name means one thing.
    assert not provider.options.keys() & provider.retired.keys()
    assert not provider.options.keys() & provider.managed.keys()
    if provider.profiles:
        assert provider.profiles.names <= provider.options.keys()
    # The defaults that are told are values that can be given.
    for option in provider.options.values():
        if option.choices and option.default:
            assert option.default.split(" ")[0] in option.choices


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("qnn", "qnn"),
        ("QNNExecutionProvider", "qnn"),
        ("NvTensorRtRtxExecutionProvider", "tensorrt-rtx"),
        ("NvTensorRTRTXExecutionProvider", "tensorrt-rtx"),
        ("NvTensorRTRTX", "tensorrt-rtx"),
        ("nvtensorrtrtx", "tensorrt-rtx"),
        ("trt_rtx", "tensorrt-rtx"),
        ("TensorrtExecutionProvider", "tensorrt"),
        ("OpenVINO", "openvino"),
        ("OpenVINOExecutionProvider", "openvino"),
        ("VitisAI", "vitisai"),
        ("dml", "directml"),
        ("DmlExecutionProvider", "directml"),
        ("CUDAExecutionProvider", "cuda"),
        ("WebGpuExecutionProvider", "webgpu"),
        ("MIGraphXExecutionProvider", "migraphx"),
        ("plugin", "plugin"),
    ],
)
def test_onnx_runtimes_names_and_other_spellings_are_taken(written: str, meant: str) -> None:
    assert find(written) is PROVIDERS[meant]


@pytest.mark.parametrize(
    "name", ["", "qn", "tensor", "ExecutionProvider", "OpenVINOExecutionProvider.AUTO"]
)
def test_other_names_are_not(name: str) -> None:
    assert find(name) is None


def test_no_name_is_that_of_two_providers() -> None:
    for provider in PROVIDERS.values():
        for name in (provider.name, provider.ep, *provider.aliases):
            assert [p.name for p in PROVIDERS.values() if name and p.answers_to(name)] in (
                [provider.name],
                [],
            )


@pytest.mark.parametrize(
    ("option", "value", "rendered"),
    [
        (switch(""), True, "1"),
        (switch(""), False, "0"),
        (switch(""), "1", "1"),
        (switch(""), "True", "1"),
        (switch(""), 0, "0"),
        (switch("", booleans=("false", "true")), True, "true"),
        (switch("", booleans=("false", "true")), "0", "false"),
        (number(""), 60, "60"),
        (number(""), "60", "60"),
        (choice("", "73", "75"), 73, "73"),
        (text(""), "a/path", "a/path"),
        (Option("", kind="json"), {"CPU": {"B": True, "A": 1}}, '{"CPU":{"A":1,"B":true}}'),
        (Option("", kind="json"), '{"CPU": {}}', '{"CPU": {}}'),
        (RTX.options["nv_weight_streaming_budget"], "512M", "512M"),
        (RTX.options["nv_weight_streaming_budget"], -1, "-1"),
        (RTX.options["nv_weight_streaming_budget"], "100%", "100%"),
    ],
)
def test_toml_values_become_the_strings_that_eps_want(
    option: Option, value: bool | int | str, rendered: str
) -> None:
    assert option.render(value) == rendered


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        (switch(""), "yes", "true or false"),
        (switch(""), 2, "true or false"),
        (number(""), "many", "a whole number"),
        (number(""), True, "a whole number"),
        (number(""), 1.5, "a whole number"),
        (number(""), {"a": 1}, "a whole number"),
        (number("", maximum=3), 4, "a whole number at least 0 at most 3"),
        (choice("", "73", "75"), 999, "one of 73, 75"),
        (text(""), 3, "a string"),
        (text(""), {}, "a string"),
        (pointer(""), 140242, "an address in the app's memory"),
        (Option("", kind="json"), "{bad", "a table, or a string of JSON"),
        (Option("", kind="json"), "[1]", "a table, or a string of JSON"),
        (RTX.options["nv_weight_streaming_budget"], "101%", "a share such as"),
        (RTX.options["nv_weight_streaming_budget"], True, "a number of bytes"),
    ],
)
def test_impossible_values_are_refused(option: Option, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        option.render(value)


def test_render() -> None:
    assert [render(value) for value in (True, 1, 1.5, "x")] == ["1", "1", "1.5", "x"]


def test_defaults_are_filled_in_and_give_way() -> None:
    assert QNN.complete({"soc_model": "60"}) == {"backend_type": "htp", "soc_model": "60"}
    assert QNN.complete({"backend_type": "gpu"}) == {"backend_type": "gpu"}
    assert QNN.complete({"backend_path": "/lib/x.so"}) == {"backend_path": "/lib/x.so"}


def test_only_what_loading_needs_is_for_loading() -> None:
    options = {"backend_type": "htp", "soc_model": "60", "htp_performance_mode": "burst"}
    assert QNN.loading(options) == {"backend_type": "htp", "htp_performance_mode": "burst"}


@pytest.mark.parametrize(
    ("asked", "disagreement"),
    [
        ({"htp_arch": "73", "soc_model": "60"}, ""),
        ({"htp_arch": "0", "soc_model": "60"}, ""),
        ({}, ""),
        ({"htp_arch": "75"}, "htp_arch = 75 was asked for and the EP compiled for 73"),
        ({"soc_model": "43"}, "soc_model = 43 was asked for and the EP compiled for 60"),
    ],
)
def test_qnn_compatibility_string_tells_what_was_compiled(
    asked: dict[str, str], disagreement: str
) -> None:
    assert QNN.disagreement("v2:6:2.51.0:5.51.0:73:60:0:0", "", asked) == disagreement


def test_a_compatibility_string_of_an_unknown_form_tells_nothing() -> None:
    assert QNN.disagreement("", "", {"htp_arch": "73"}) == ""
    assert QNN.disagreement("v9:whatever", "", {"htp_arch": "73"}) == ""


def test_qnn_names_the_arch_that_its_soc_has() -> None:
    assert QNN.contradictions({"soc_model": "60", "htp_arch": "73"}) == {}
    assert QNN.contradictions({"soc_model": "12345", "htp_arch": "75"}) == {}
    (what,) = QNN.contradictions({"soc_model": "60", "htp_arch": "75"}).values()
    assert "soc_model 60 has HTP architecture 73" in what


def test_where_qnn_contexts_can_be_run() -> None:
    assert QNN.runs_on("linux", "x86_64")
    assert QNN.runs_on("win32", "AMD64")
    assert not QNN.runs_on("linux", "aarch64")
    assert not QNN.runs_on("darwin", "x86_64")


def test_where_qnn_can_be_installed() -> None:
    assert QNN.unavailable((3, 11), "linux") == ""
    assert QNN.unavailable((3, 10), "linux") == "needs Python 3.11 or newer, and this is 3.10"
    assert QNN.unavailable((3, 13), "darwin") == "has no packages for this system, darwin"
    assert PROVIDERS["cpu"].unavailable((3, 10), "darwin") == ""


def test_plugins_survive_the_way_into_the_manifest() -> None:
    assert QNN.plugin is not None
    assert from_json(to_json(QNN.plugin), type(QNN.plugin)) == QNN.plugin


def test_what_a_compatibility_string_says() -> None:
    qnn = QNN.compiled_for("v2:6:2.51.0:5.51.0:73:60:0:0")
    assert qnn == {"soc_model": "60", "htp_arch": "73"}
    assert QNN.compiled_for("") == {}
    openvino = OPENVINO.compiled_for(OPENVINO_SAYS)
    assert openvino == {"OpenVINO": "2026.4.1", "ISA": "Intel AVX10.1 and Intel AMX"}
    for other in ("", "v2:6", "[]", "{}", '{"ov_compat_string": 3}'):
        assert OPENVINO.compiled_for(other) == {}


OPENVINO_SAYS = json.dumps(
    {
        "ovep_ver": "1.8.1",
        "ov_compat_string": "meta=1.0;ov=2026.4.1;isa=Intel AVX10.1 and Intel AMX",
    }
)


def test_openvinos_versions_have_to_be_one() -> None:
    assert OPENVINO.disagreement(OPENVINO_SAYS, "2026.4", {}) == ""
    assert OPENVINO.disagreement(OPENVINO_SAYS, "", {}) == ""
    assert OPENVINO.disagreement("", "2026.4", {}) == ""
    told = OPENVINO.disagreement(OPENVINO_SAYS, "2025.4", {})
    assert told == "the context is of OpenVINO 2025.4, and its compatibility is with 2026.4.1"


def test_profiles_become_the_eps_strings() -> None:
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
    # TensorRT has no switch for it.
    assert ProfileOptions("a", "b", "c").render([both, both]).keys() == {"a", "b", "c"}


def test_tensorrt_writes_its_own_contexts() -> None:
    assert PROVIDERS["tensorrt"].own_context_options is not None
    assert PROVIDERS["tensorrt"].own_context_options("/made/a_ctx.onnx", True) == {
        "trt_dump_ep_context_model": "1",
        "trt_ep_context_file_path": "/made/a_ctx.onnx",
        "trt_ep_context_embed_mode": "1",
        "trt_engine_cache_enable": "0",
    }


@pytest.mark.parametrize(
    ("message", "name", "supplier"),
    [
        (
            (
                "Failed to load library /site-packages/libonnxruntime_providers_x.so with error: "
                "libcuda.so.1: cannot open shared object file: No such file or directory"
            ),
            "libcuda.so.1",
            "the driver of an NVIDIA GPU",
        ),
        ("libcudart.so.13: cannot open shared object file", "libcudart.so.13", "CUDA's libraries"),
        ("libnvinfer.so.10: cannot open shared object file", "libnvinfer.so.10", "TensorRT"),
        ("libcudnn.so.9: cannot open shared object file", "libcudnn.so.9", "cuDNN"),
        ("libof_mine.so: cannot open shared object file", "libof_mine.so", ""),
    ],
)
def test_what_brings_a_missing_library(message: str, name: str, supplier: str) -> None:
    found = missing(message)
    assert found is not None
    assert found[0] == name
    assert supplier in found[1]


def test_other_messages_name_no_missing_library() -> None:
    assert missing("a.onnx: invalid ELF header") is None


def declared(header: str) -> Mapping[str, tuple[str, str]]:
    """Each option that a C++ header declares -> its type and its default, as its comment says them."""
    options = header.split("namespace provider_option_names")[1].split(
        "}  // namespace", maxsplit=1
    )[0]
    found = {}
    for comment, name in re.findall(
        r'((?:///[^\n]*\n)+)constexpr const char\* k\w+ = "(\w+)";', options
    ):
        lines = [line.removeprefix("///").strip() for line in comment.splitlines()]
        kind = lines[lines.index("@par Type") + 1]
        default = lines[lines.index("@par Default") + 1]
        found[name] = (kind, default.strip('`"'))
    return found


def test_tensorrt_rtxs_options_are_those_of_its_package() -> None:
    spec = importlib.util.find_spec("onnxruntime_ep_nv_tensorrt_rtx")
    if spec is None or spec.origin is None:
        pytest.skip("onnxruntime-ep-nv-tensorrt-rtx has no wheels for this platform")
    header = Path(spec.origin).with_name("tensorrt_rtx_provider_options.h").read_text("utf-8")
    there = declared(header)
    assert len(there) > 20
    # ONNX Runtime's own, for every EP with devices; the documentation has it, and the header has not.
    assert RTX.options.keys() | RTX.managed.keys() == there.keys() | {"device_id"}
    kinds = {"Boolean": {"bool"}, "Integer": {"int"}, "String": {"text", "pointer"}}
    for name in there.keys() - RTX.managed.keys():
        kind, default = there[name]
        assert RTX.options[name].kind in kinds[kind], name
        assert RTX.options[name].default.split(":")[0] == default, name
    (targets,) = re.findall(r"kTargetSMValues\[\] = \{(.*?)\}", header)
    assert RTX.options["nv_target_sm"].choices == tuple(re.findall(r'"(\w+)"', targets))


def library_of(module: str) -> bytes:
    """The contents of the plugin library in the package ``module``."""
    found = importlib.util.find_spec(module)
    if found is None:
        pytest.skip(f"{module} has no wheels for this Python or platform")
    return Path(importlib.import_module(module).get_library_path()).read_bytes()


@pytest.mark.parametrize("provider", ["openvino", "qnn"])
def test_options_are_words_that_the_library_knows(provider: str) -> None:
    known = PROVIDERS[provider]
    assert known.plugin is not None
    library = library_of(known.plugin.module)
    assert [name for name in known.options if name.encode() not in library] == []


def test_webgpus_options_are_those_of_its_library() -> None:
    library = library_of("onnxruntime_ep_webgpu")
    there = set(re.findall(rb"ep\.webgpuexecutionprovider\.(\w+)", library))
    assert {name.decode() for name in there} == PROVIDERS["webgpu"].options.keys()
