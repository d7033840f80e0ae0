"""Which target `load` opens, and what `explain` and `path` say."""

from __future__ import annotations

import logging

import onnxruntime
import pytest

from tests.loader.shipped import CPU, CPU_EP, NPU, Shipper, Table, X, damage, outcomes


def test_the_first_target_that_can_be_opened_is_opened(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    session = app.load("a")
    assert isinstance(session, onnxruntime.InferenceSession)
    assert session.run(None, X)[0].shape == (1, 10)
    assert app.target_of(session) == "cpu"
    assert app.models() == ["a"]
    cpu, source = app.explain("a")
    assert cpu.outcome is app.Outcome.OPENED
    assert source == ("source", "not needed", None)
    assert str(source) == "source: not needed"


def test_without_the_eps_package_the_source_is_opened_and_the_reason_logged(
    ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(npu=NPU)
    with caplog.at_level(logging.INFO):
        session = app.load("a")
    assert app.target_of(session) == "source"
    assert "a on npu: skipped, no-such-ep is not installed" in caplog.text
    npu, source = app.explain("a")
    assert str(npu).startswith("npu: skipped, no-such-ep is not installed")
    assert str(source) == f"source: opened, {CPU_EP} on cpu"


def test_a_requested_target_or_device_has_no_fallback(ship: Shipper) -> None:
    app = ship(cpu=CPU, npu=NPU)
    assert app.target_of(app.load("a", target="source")) == "source"
    with pytest.raises(app.LoadError, match=r"on this machine:\n  npu: skipped, no-such-ep"):
        app.load("a", target="npu")
    assert app.target_of(app.load("a", device="cpu")) == "cpu"
    refused = "source: skipped, it is for the cpu, and device='npu' was requested"
    with pytest.raises(app.LoadError, match=refused):
        app.load("a", device="npu")


def test_without_a_fallback_the_source_is_not_opened_unless_it_is_named(ship: Shipper) -> None:
    app = ship(npu=NPU)
    with pytest.raises(app.LoadError, match="npu: skipped") as raised:
        app.load("a", fallback=False)
    assert "source" not in str(raised.value)
    assert outcomes(app.explain("a", fallback=False)) == [("npu", "skipped")]
    assert app.target_of(app.load("a", fallback=False, target="source")) == "source"
    app = ship(cpu=CPU)
    assert app.target_of(app.load("a", fallback=False)) == "cpu"


def test_a_source_that_is_not_shipped_is_no_target(ship: Shipper) -> None:
    app = ship(source=None, npu=NPU)
    assert outcomes(app.explain("a")) == [("npu", "skipped")]
    with pytest.raises(app.LoadError, match=r"Known: npu\."):
        app.load("a", target="source")


def test_a_model_without_targets_cannot_be_opened(ship: Shipper) -> None:
    app = ship(source=None)
    with pytest.raises(app.LoadError, match=r"'a' has no targets in .*shipped"):
        app.load("a")
    with pytest.raises(app.LoadError, match="'a' has no targets"), app.path("a"):
        pass


def test_an_unknown_name_is_an_error_that_lists_the_known_names(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    with pytest.raises(app.LoadError, match=r"unknown model 'aa'\. Known: a"):
        app.load("aa")
    with pytest.raises(app.LoadError, match="Known: cpu, source"):
        app.explain("a", target="gpu")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "NPU"}, "device"),
        ({"device": ""}, "device"),
        ({"target": 5}, "unknown target 5"),
        ({"package": "no\0where"}, "cannot be read"),
        ({"package": "\ud800"}, "cannot be read"),
        ({"shapes": {"y": (1, 1, 8, 8)}}, "'y'"),
        ({"shapes": {"x": (1, 8, 8)}}, "'x'"),
        ({"session_options": lambda: 5}, "AttributeError"),
    ],
)
def test_a_value_that_an_argument_does_not_take_is_a_load_error(
    ship: Shipper, arguments: Table, named: str
) -> None:
    app = ship(source=None, cpu=CPU)
    with pytest.raises(app.LoadError) as raised:
        app.load("a", **arguments)
    assert named in str(raised.value)


def test_explain_takes_what_load_takes_to_choose_a_target(ship: Shipper) -> None:
    app = ship(npu=NPU, cpu=CPU)
    assert outcomes(app.explain("a", target="cpu")) == [("cpu", "opened")]
    assert outcomes(app.explain("a", device="cpu", fallback=False)) == [
        ("npu", "skipped"),
        ("cpu", "opened"),
    ]
    (ship.folder / "a/cpu/a_optimized.onnx").write_bytes(b"x" * 100)
    _, cpu, source = app.explain("a", verify=True, shapes={"x": (1, 1, 8, 8)})
    assert (cpu.outcome, source.outcome) == ("failed", "opened")
    assert app.explain("a", package=ship.folder) == app.explain("a")
    with pytest.raises(app.LoadError, match="recompile = true"):
        app.explain("a", recompile=True)
    with pytest.raises(TypeError):
        app.explain("a", devcie="npu")


def test_path_gives_the_files_of_a_target(ship: Shipper) -> None:
    app = ship(cpu=CPU, npu=NPU)
    damage(ship.folder / "a/npu/a_ctx.onnx", "missing")
    with app.path("a") as file:
        assert file == ship.folder / "a/cpu/a_optimized.onnx"
    with app.path("a", "source") as file:
        assert file == ship.folder / "a/source/a.onnx"
    with app.path("a", target="source", package=str(ship.folder)) as file:
        assert file.is_file()
    for arguments, message in (
        (("aa",), "unknown model 'aa'"),
        (("a", "gpu"), "unknown target 'gpu'"),
        (("a", "npu"), r"a/npu/a_ctx\.onnx is missing"),
    ):
        with pytest.raises(app.LoadError, match=message), app.path(*arguments):
            pass


def test_an_error_of_the_caller_of_path_stays_what_it_is(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    with pytest.raises(ZeroDivisionError), app.path("a"):
        _ = 1 / 0


def test_target_of_knows_only_sessions_of_this_module(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    foreign = onnxruntime.InferenceSession(ship.folder / "a/source/a.onnx", providers=[CPU_EP])
    with pytest.raises(KeyError):
        app.target_of(foreign)
