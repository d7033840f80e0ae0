from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.recorder import SAMPLES, Recorder
from tests.models import model, parsed, value

Array = np.ndarray[Any, Any]

STATE = np.array([0.5, 1], np.float32)

UNSIZED: dict[str, Any] = {"dims": {}, "shapes": {}, "show": False}


class App:
    """An app that feeds ``x`` and a state to a model, and is recorded below ``folder``."""

    def __init__(self, folder: Path, dtype: int = TensorProto.FLOAT) -> None:
        content = model(
            [helper.make_node("Add", ["state", "state"], ["state_out"])],
            [value("x", ["n"], dtype), value("state", [2])],
            [value("state_out", [2])],
        ).SerializeToString()
        digest = hashlib.sha256(content).hexdigest()
        session = type("Session", (onnxruntime.InferenceSession,), {})
        (folder / "a").mkdir(parents=True)
        Recorder(folder, {"a": {**UNSIZED, "sha256": digest}}).wrap(session)
        self._session = session(content)
        self._folder = folder

    def run(self, x: Any, state: Array = STATE) -> Array:
        outputs: list[Array] = self._session.run(None, {"x": x, "state": state})
        return outputs[0]

    @property
    def samples(self) -> list[list[int]]:
        """The first value of ``x`` in the frames of each sample that is kept."""
        samples: dict[int, list[tuple[int, int]]] = {}
        for file in self._folder.glob("a/*.npz"):
            _, sample, frame = map(int, file.stem.split("-"))
            samples.setdefault(sample, []).append((frame, int(arrays(file)["x"].flat[0])))
        return [[x for _, x in sorted(samples[number])] for number in sorted(samples)]


def arrays(file: Path) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as content:
        return dict(content)


def test_the_first_sample_and_a_random_choice_of_the_others_are_kept(tmp_path: Path) -> None:
    chosen = []
    for name in ("one", "other"):
        app = App(tmp_path / name)
        for index in range(400):
            app.run(np.full(3, index, np.float32))
        chosen.append([x for (x,) in app.samples])
    first, *others = chosen[0]
    assert first == 0
    assert len(others) == SAMPLES - 1
    assert min(others) < 200 < max(others)
    assert chosen[0] == chosen[1]


def test_a_sample_of_a_recurrent_model_has_consecutive_frames(tmp_path: Path) -> None:
    app = App(tmp_path)
    for stream in range(40):
        state = STATE
        for frame in range(10):
            state = app.run(np.full(1, 100 * stream + frame, np.float32), state)
    samples = app.samples
    assert samples[0] == list(range(8))
    assert len(samples) == SAMPLES
    assert all(xs == list(range(xs[0], xs[0] + len(xs))) for xs in samples)
    # After eight frames a sample ends, and the rest of the stream is another one.
    assert {len(xs) for xs in samples} <= {8, 2}


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (TensorProto.STRING, np.array(["a", "bc"], object)),
        (TensorProto.STRING, ["a", "bc"]),
        (TensorProto.BOOL, np.array([True, False])),
        (TensorProto.FLOAT, np.zeros(0, np.float32)),
        (TensorProto.DOUBLE, [1.0, 1e300]),
        (TensorProto.INT64, onnxruntime.OrtValue.ortvalue_from_numpy(np.array([1, 2**40]))),
    ],
)
def test_values_of_all_types_are_read_back(tmp_path: Path, dtype: int, values: Any) -> None:
    app = App(tmp_path, dtype)
    app.run(values)
    expected = values.numpy() if isinstance(values, onnxruntime.OrtValue) else np.asarray(values)
    (file,) = tmp_path.glob("a/*.npz")
    assert arrays(file)["x"].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("dims", "size", "expected"),
    [
        # Without the rows that are left.
        ({"N": 2}, (5, 3), [[0, 1], [2, 3]]),
        # Whole: the compiled size, too few rows, another length, and no compiled size.
        ({"N": 2, "T": 3}, (2, 3), [[0, 1]]),
        ({"N": 4}, (2, 3), [[0, 1]]),
        ({"T": 2}, (2, 4), [[0, 1]]),
        ({}, (2, 3), [[0, 1]]),
    ],
)
def test_a_batch_is_kept_as_samples_of_the_compiled_size(
    tmp_path: Path, dims: dict[str, int], size: tuple[int, int], expected: list[list[int]]
) -> None:
    content = parsed(
        """(float[N, T] x, float[1, N, 1] h) => (float[N, T] y, float[1, N, 1] h_out) {
            h_out = Add (h, one)
            s = Squeeze (h, zero)
            y = Add (x, s) }""",
        one=np.ones(1, np.float32), zero=np.zeros(1, np.int64),
    ).SerializeToString()  # fmt: skip
    (tmp_path / "a").mkdir()
    class_ = type("Session", (onnxruntime.InferenceSession,), {})
    known = {**UNSIZED, "dims": dims, "sha256": hashlib.sha256(content).hexdigest()}
    Recorder(tmp_path, {"a": known}).wrap(class_)
    session, (rows, length) = class_(content), size
    x = np.tile(np.arange(rows, dtype=np.float32)[:, None], length)
    h = x[None, :, :1]
    for _ in range(3):
        h = session.run(["h_out"], {"x": x, "h": h})[0]
    kept = {file.stem.partition("-")[2]: arrays(file) for file in tmp_path.glob("a/*.npz")}
    assert len(kept) == 3 * len(expected)
    for name, sample in kept.items():
        number, frame = map(int, name.split("-"))
        assert sample["x"][:, 0].tolist() == expected[number]
        assert sample["h"].tolist() == [[[row + frame - 1] for row in expected[number]]]
