"""Options of sessions and providers."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest

from tests.conftest import needs_qnn
from tests.loader.shipped import CPU, CPU_EP, NPU, QNN, Shipper, changed, damage, opener


def test_settings_of_the_opened_target_alone_are_added_to_the_apps_session_options(
    ship: Shipper,
) -> None:
    app = ship(npu=NPU, cpu=CPU)
    options = onnxruntime.SessionOptions()
    options.logid = "mine"
    app.load("a", session_options=options)
    assert options.get_session_config_entry("session.intra_op_num_threads") == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        options.get_session_config_entry("session.disable_model_compile")


def test_session_options_are_for_one_call_and_a_function_creates_them_for_each_target(
    ship: Shipper,
) -> None:
    app, options = ship(cpu=CPU), onnxruntime.SessionOptions()
    app.load("a", session_options=options)
    for call in (app.load, app.explain):
        with pytest.raises(app.LoadError, match="were used before"):
            call("a", session_options=options)
    made = []

    def make() -> onnxruntime.SessionOptions:
        made.append(onnxruntime.SessionOptions())
        return made[-1]

    damage(ship.folder / "a/cpu/a_optimized.onnx")
    for _ in range(2):
        assert app.target_of(app.load("a", session_options=make)) == "source"
    assert len(made) == 4


def test_options_are_passed_on_as_the_manifest_and_the_app_have_them(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"backend_path": "/opt/lib/x.so", "trt_profile_min_shapes": "x:1x1x8x8", "y": "../z"}
    of_ours = {"cache": "{user-cache}/rtx", "plugins": "{file}/1/a.so;{file}/2/b.so"}
    cpu = changed(CPU, load_options=of_ours)
    cpu["executor_info"]["ort"]["provider_options"] = options
    app = ship(cpu=cpu)
    used = []

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *arguments: Any, providers: Any, **named: Any) -> None:
            used.append(providers)
            super().__init__(*arguments, providers=providers, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    for target in ("cpu", "source"):
        app.load("a", target=target, provider_options={"y": True, "size": 5, "text": "x"})
    cache = app.user_folder() / "rtx"
    folder = opener(app, "cpu").variant.option_files
    plugins = f"{folder}/1/a.so;{folder}/2/b.so"
    given = {"cache": str(cache), "plugins": plugins, "y": "1", "size": "5", "text": "x"}
    assert used == [[(CPU_EP, {**options, **given})], [(CPU_EP, {})]]
    assert cache.is_dir()


@needs_qnn
def test_one_object_of_session_options_is_enough_for_the_fallback(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    options = onnxruntime.SessionOptions()
    # QNN was added to these options, and then could not open its context.
    session = app.load("a", device="any", session_options=options)
    assert app.target_of(session) == "source"
    assert session.get_providers() == [CPU_EP]
