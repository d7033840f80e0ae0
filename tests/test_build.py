"""Plans that are run, with real workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import onnxruntime
import pytest

from hatch_epcontext import job as job_module
from hatch_epcontext import proof as proof_module
from hatch_epcontext import requirements
from hatch_epcontext.build import build
from hatch_epcontext.cache import Cache
from hatch_epcontext.config import load
from hatch_epcontext.errors import BuildError
from hatch_epcontext.plan import Job, plan
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import InspectRequest
from hatch_epcontext.pyproject import parse
from hatch_epcontext.result import Result
from tests.conftest import needs_qnn
from tests.models import half_for_the_cpu, network, save, transformer

QNN = """
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73 }
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
"""

CPU = 'provider = "cpu"\nmodels = ["models/a.onnx"]\n'

Run = Callable[..., Result]


@pytest.fixture
def told() -> list[str]:
    """What the build said."""
    return []


@pytest.fixture
def run(project: Path, tmp_path: Path, told: list[str]) -> Run:
    """Build the project with the given configuration; all builds share one cache."""
    save(network(), project / "models" / "a.onnx")
    count = iter(range(100))

    def built(toml: str, environ: Mapping[str, str] | None = None) -> Result:
        staging = tmp_path / f"staging-{next(count)}"
        staging.mkdir()
        cache = Cache(tmp_path / "cache", staging / "cache", told.append)
        return build(
            plan(load(project, parse(toml), {}, environ or {})), staging, cache, told.append
        )

    return built


@needs_qnn
def test_a_context_is_compiled_and_proven_once(run: Run, told: list[str]) -> None:
    first, second = run(QNN), run(QNN)
    assert (first.built[0].cached, second.built[0].cached) == (False, True)
    assert first.built[0].artifact == second.built[0].artifact
    assert first.built[0].proofs == second.built[0].proofs
    proof = first.built[0].proofs["a"]
    assert proof.how == "run"
    assert proof.cosine is not None
    assert proof.cosine > 0.999
    assert told[0].startswith(
        "a -> qnn (qnn): 4/4 nodes in 1 context, for soc_model 60, htp_arch 73, ran and agrees with "
    )
    assert told[1].endswith("from the cache")


def test_an_interrupted_build_stops_its_workers(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    workers = Workers(120)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    planned = plan(load(project, parse(CPU), {}, {}))
    with pytest.raises(KeyboardInterrupt):
        build(planned, tmp_path, Cache(None, tmp_path / "cache", print), interrupt, workers)
    request = InspectRequest((), {})
    with pytest.raises(BuildError, match=r"b -> cpu\n    the build was interrupted"):
        workers.call(request, tmp_path / "another", where="b -> cpu")


@needs_qnn
def test_what_is_left_to_the_cpu_fails_by_default_and_is_named(project: Path, run: Run) -> None:
    toml = QNN.replace("dims = { batch = 1 }", 'inputs = "ones"')
    save(half_for_the_cpu(), project / "models" / "a.onnx")
    with pytest.raises(BuildError) as raised:
        run(toml)
    (problem,) = raised.value.problems
    assert problem.where == "a -> qnn"
    assert "compiled 2 of 3 nodes (66.7%), and min-coverage is 100.0%" in problem.what
    assert (
        "Left to the CPU: NonZero where (the shape of its output 'y' depends on the data)."
        in problem.what
    )
    assert "cut the model before them" in problem.fix
    (built,) = run(toml + "min-coverage = 0.6\n").built
    assert built.cached, "a lower bound is no reason to compile again"


@needs_qnn
def test_another_tolerance_is_proven_anew_without_compiling(run: Run) -> None:
    run(QNN)
    strict = QNN.replace("dims", "tolerance = { rtol = 0, atol = 0 }, dims")
    with pytest.raises(BuildError, match=r"a -> qnn: validation\n.*disagrees with the CPU's"):
        run(strict)
    (built,) = run(QNN.replace("dims", 'inputs = "ones", dims')).built
    assert built.cached


def test_other_inputs_in_the_same_file_are_proven_anew(project: Path, run: Run) -> None:
    import numpy as np

    toml = CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", inputs = "x.npz" }')
    x = np.ones((1, 1, 8, 8), np.float32)
    np.savez(project / "x.npz", x=x)
    run(toml)
    np.savez(project / "x.npz", y=x)
    with pytest.raises(BuildError, match="has no array for the input 'x'"):
        run(toml)


@pytest.mark.parametrize(
    ("validate", "how"), [('"auto"', "structure"), ('"structure"', "structure"), ("false", "none")]
)
def test_where_the_ep_cannot_run_only_the_structure_is_checked_and_that_is_said(
    run: Run, told: list[str], monkeypatch: pytest.MonkeyPatch, validate: str, how: str
) -> None:
    cannot(monkeypatch)
    toml = CPU.replace('"models/a.onnx"', f'{{ path = "models/a.onnx", validate = {validate} }}')
    proof = run(toml).built[0].proofs["a"]
    assert (proof.how, proof.agreements) == (how, ())
    assert "NOT" in told[0]
    assert proof.why in told[0]


def test_a_required_run_fails_where_there_can_be_none(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cannot(monkeypatch)
    toml = CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", validate = "require" }')
    with pytest.raises(BuildError, match="cannot run its contexts on this machine"):
        run(toml)


def cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build machine on which no provider can run what it compiles."""
    find = proof_module.cannot

    def why(job: Job) -> str:
        provider = dataclasses.replace(job.target.provider, runs_on=lambda *_: False)
        target = dataclasses.replace(job.target, provider=provider)
        return find(dataclasses.replace(job, target=target))

    monkeypatch.setattr(proof_module, "cannot", why)
    monkeypatch.setattr(job_module, "cannot", why)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="this ONNX Runtime has CUDA",
)
def test_the_cpu_stands_in_for_an_absent_ep_and_that_is_said(
    run: Run, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = CPU.replace('"cpu"', '"cuda"')
    proof = run(toml).built[0].proofs["a"]
    assert (proof.how, len(proof.agreements)) == ("cpu", 1)
    assert proof.why.endswith("has no CUDAExecutionProvider")
    assert f"ran on the CPU only ({proof.why}) and agrees with the CPU" in told[0]
    # What was absent then may be here now: it is asked again.
    assert run(toml).built[0].cached
    required = toml.replace('"models/a.onnx"', '{ path = "models/a.onnx", validate = "require" }')
    with pytest.raises(BuildError, match='has no CUDAExecutionProvider, and validate is "require"'):
        run(required)


FROM_CACHE = {"HATCH_EPCONTEXT_FROM_CACHE": "cpu"}


def test_a_target_is_taken_from_the_cache_whatever_is_installed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(CPU)
    monkeypatch.setattr(requirements, "installed", lambda name: "99.0" if name in ONNX else None)
    monkeypatch.setattr(job_module.JobRunner, "_compile", None)
    (built,) = run(CPU, FROM_CACHE).built
    assert built.cached
    assert built.artifact == first.built[0].artifact
    assert built.proofs == first.built[0].proofs
    # What compiled it, and not what is installed now.
    assert built.artifact.record.versions["onnxruntime"] != "99.0"


ONNX = ("onnxruntime", "onnx", "onnxslim", "numpy")


def test_what_the_cache_does_not_have_is_told(project: Path, run: Run) -> None:
    with pytest.raises(BuildError, match="the cache has nothing that was made of this model") as it:
        run(CPU, FROM_CACHE)
    assert "HATCH_EPCONTEXT_TARGETS=cpu" in str(it.value)
    run(CPU)
    with pytest.raises(BuildError, match="was not proven with these inputs"):
        run(
            CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", inputs = "ones" }'),
            FROM_CACHE,
        )
    save(network(3), project / "models" / "a.onnx")
    with pytest.raises(BuildError, match="the cache has nothing that was made of this model"):
        run(CPU, FROM_CACHE)


SHARED = """
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73 }
[[models]]
path = "models/prefill.onnx"
share-weights = "lm"
[[models]]
path = "models/decode.onnx"
share-weights = "lm"
"""


@pytest.fixture
def lengths(project: Path) -> None:
    for name, length in (("prefill", 64), ("decode", 1)):
        save(transformer(length), project / "models" / f"{name}.onnx")


@needs_qnn
@pytest.mark.usefixtures("lengths")
def test_a_group_is_one_artifact_and_its_members_are_run_alone(run: Run, told: list[str]) -> None:
    (first,), (second,) = run(SHARED).built, run(SHARED).built
    assert (first.cached, second.cached) == (False, True)
    assert first.proofs == second.proofs
    assert len(first.artifact.record.files) == 3
    for name in ("prefill", "decode"):
        proof = first.proofs[name]
        assert (proof.how, len(proof.agreements)) == ("alone", 1)
        assert proof.why == "QNNExecutionProvider cannot open contexts that share weights here"
    # Nearly as much as one of the two has.
    assert 0.6 < first.saved / first.artifact.size < 1
    assert first.saved == second.saved
    assert "lm (prefill + decode) -> qnn (qnn): prefill 8/8 nodes in 1 context" in told[0]
    assert "structure checked (QNNExecutionProvider cannot open" in told[0]
    assert "compiled alone it ran and agrees with the CPU" in told[0]
    assert "saved by sharing" in told[0]


@needs_qnn
@pytest.mark.usefixtures("lengths")
def test_a_member_that_is_wrong_alone_fails_the_group(run: Run) -> None:
    strict = SHARED.replace('"lm"', '"lm"\ntolerance = { rtol = 0, atol = 0 }')
    with pytest.raises(BuildError, match=r"-> qnn: validation\n.*disagrees with the CPU's"):
        run(strict)


@needs_qnn
@pytest.mark.usefixtures("lengths")
def test_a_group_that_has_to_run_fails_where_it_cannot(run: Run) -> None:
    required = SHARED.replace('"lm"', '"lm"\nvalidate = "require"')
    with pytest.raises(BuildError, match='share weights here, and validate is "require"'):
        run(required)


@needs_qnn
def test_a_model_that_is_too_large_to_embed_is_refused_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "PROTOBUF_LIMIT", 1000)
    with pytest.raises(
        BuildError, match="cannot be larger than 2 GiB, and the model has"
    ) as raised:
        run(QNN + "embed = true")
    assert "Leave embed out" in raised.value.problems[0].fix
    run(QNN)


@needs_qnn
@pytest.mark.usefixtures("lengths")
def test_a_group_of_an_ep_that_opens_them_is_opened_together(run: Run) -> None:
    toml = SHARED.replace(
        'provider = "qnn"',
        'provider = "plugin"\nlibrary = "onnxruntime_qnn"\nep-name = "QNNExecutionProvider"',
    ).replace("{ soc", '{ backend_type = "htp", soc')
    # As a plugin of which nothing is known it is expected to. Its simulator says that it cannot, or
    # crashes: both were seen.
    with pytest.raises(BuildError, match=r"QNN_COMMON_ERROR_NOT_SUPPORTED|SIGSEGV") as raised:
        run(toml)
    assert raised.value.problems[0].where == "lm (prefill + decode) -> plugin: validation"
    (built,) = run(toml.replace('"lm"', '"lm"\nvalidate = "structure"')).built
    assert {proof.how for proof in built.proofs.values()} == {"structure"}
