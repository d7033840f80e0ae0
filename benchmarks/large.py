"""Builds a wheel with a model beyond the 2 GiB limit of an ONNX file.

    pip install -e . --group bench
    python -m benchmarks.large                      # the provider cpu
    python -m benchmarks.large --provider qnn       # needs several times the memory of the model

Generates a network of matrix products, with random weights in one file of external data, builds a wheel
with Hatch's own builder, twice, and prints the time and the peak memory of the build process. It fails
when that is more than 100 MB (measured on Linux only). The workers need what ONNX Runtime and the EP need.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import project
from benchmarks.measure import run

SIZE = 4096
"""Rows and columns of each matrix: 64 MiB of float32."""

GOAL = 100 * 10**6
"""Bytes of memory that the build process may need."""

BUILD = """
import json, re, sys
from pathlib import Path
from hatchling.builders.wheel import WheelBuilder
(wheel,) = WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"])
# Not getrusage: its peak includes that of the parent process.
status = Path("/proc/self/status")
peak = re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1] if status.exists() else "0"
print(json.dumps({"wheel": wheel, "peak": 1024 * int(peak)}))
"""


def generate(path: Path, matrices: int) -> int:
    """Write a network of ``matrices`` products to ``path``, with its weights beside it.

    Returns the size of the weights in bytes. Writes one weight after the other, because all of them
    need not fit into memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    data = path.with_name(f"{path.name}.data")
    nodes, weights, current = [], [], "x"
    with data.open("wb") as file:
        for index in range(matrices):
            matrix = rng.standard_normal((SIZE, SIZE), np.float32) * (2 / SIZE) ** 0.5
            weight = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[SIZE, SIZE])
            weight.data_location = TensorProto.EXTERNAL
            entries = {"location": data.name, "offset": file.tell(), "length": matrix.nbytes}
            for key, value in entries.items():
                weight.external_data.add(key=key, value=str(value))
            file.write(matrix.tobytes())
            weights.append(weight)
            nodes += [
                helper.make_node(
                    "MatMul", [current, weight.name], [f"m{index}"], f"product{index}"
                ),
                helper.make_node("Relu", [f"m{index}"], [f"r{index}"], f"relu{index}"),
            ]
            current = f"r{index}"
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIZE]) for name in ("x", current)
    ]
    graph = helper.make_graph(nodes, "large", tensors[:1], tensors[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return data.stat().st_size


def main() -> None:
    """Generate the model, build the wheel twice, and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--provider", choices=project.TARGETS, default="cpu")
    parser.add_argument("--matrices", type=int, default=36, help="64 MiB each; 36 are 2.25 GiB")
    arguments = parser.parse_args()
    peaks = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary).resolve() / "project"
        targets = {arguments.provider: project.TARGETS[arguments.provider]}
        models = ["models/large.onnx"]
        project.write_project(root, {"fallback": "none", "targets": targets, "models": models})
        size = generate(root / "models" / "large.onnx", arguments.matrices)
        print(f"weights: {size / 2**30:.2f} GiB")
        env = {"HATCH_EPCONTEXT_CACHE_DIR": str(Path(temporary) / "cache")}
        for name in ("first build", "second build, from the cache"):
            done = run([sys.executable, "-c", BUILD, root, root / "dist"], root, env)
            built = json.loads(done.stdout.splitlines()[-1])
            peaks.append(built["peak"])
            print(
                f"{name}: {done.cost.wall:.0f} s, {done.cost.cpu:.0f} s of CPU time, "
                f"{built['peak'] / 10**6:.0f} MB of memory in the build process, "
                f"a wheel of {Path(built['wheel']).stat().st_size / 2**30:.2f} GiB"
            )
    if max(peaks) > GOAL:
        raise SystemExit(f"the build process needed more than {GOAL / 10**6:.0f} MB")


if __name__ == "__main__":
    main()
