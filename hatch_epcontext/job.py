"""One job, from its fingerprint to its proof: cache, preparation, compiling, measuring, validation."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hatch_epcontext.artifact import (
    Artifact,
    Preparation,
    Proof,
    Record,
    Times,
    link_or_copy,
    record_files,
)
from hatch_epcontext.cache import Cache
from hatch_epcontext.config import Model
from hatch_epcontext.coverage import check_coverage
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.fingerprint import fingerprint
from hatch_epcontext.plan import Job, model_spec, model_spec_of, target_spec
from hatch_epcontext.preparation import prepare
from hatch_epcontext.process import Workers
from hatch_epcontext.proof import (
    cannot,
    cannot_run,
    proof_alone,
    proof_key,
    proof_of,
    without_running,
)
from hatch_epcontext.protocol import (
    PROTOBUF_LIMIT,
    CompileReply,
    CompileRequest,
    Context,
    MeasureReply,
    MeasureRequest,
    ValidateReply,
    ValidateRequest,
)
from hatch_epcontext.requirements import versions_of
from hatch_epcontext.result import Built, Source


@dataclass(frozen=True)
class JobRunner:
    """Runs jobs of one build; ``versions`` are of all that is installed for it."""

    sources: Mapping[str, Source]
    versions: Mapping[str, str]
    cache: Cache
    staging: Path
    workers: Workers

    def run(self, job: Job) -> Built:
        """Take the job's artifact from the cache or make it, and prove it.

        Raises BuildError with what is wrong with the job.
        """
        scratch = self.staging / "jobs" / job.folder
        scratch.mkdir(parents=True)
        recipe = self._recipe(job)
        if job.target.from_cache:
            artifact, cached = self._latest(job, recipe), True
        else:
            key = self._key(job)
            found = self.cache.get(key)
            artifact, cached = found or self._compile(job, key, scratch), found is not None
            self.cache.note_latest(recipe, key)
        for context in artifact.record.contexts:
            check_coverage(context.coverage, job.target, job.where)
        alone = {each.models[0].name: self.run(each) for each in job.alone if job.group}
        proofs = {
            context.model: proof_alone(job, model, alone[model.name].proofs[model.name])
            if job.group and not job.target.provider.loads_shared
            else self._prove(job, model, artifact, context, scratch)
            for model, context in zip(job.models, artifact.record.contexts, strict=True)
        }
        saved = sum(built.artifact.size for built in alone.values()) - artifact.size if alone else 0
        return Built(job, artifact, proofs, cached, saved)

    def peek(self, job: Job) -> tuple[str, bool]:
        """The job's fingerprint, and whether the cache has what it names; nothing is made."""
        recipe = self._recipe(job)
        if job.target.from_cache:
            return recipe, self.cache.latest(recipe) is not None
        key = self._key(job)
        return key, self.cache.get(key) is not None

    def _latest(self, job: Job, recipe: str) -> Artifact:
        artifact = self.cache.latest(recipe)
        if artifact is None:
            raise BuildError(
                Problem(
                    job.where,
                    "HATCH_EPCONTEXT_FROM_CACHE names its target, and the cache has nothing that was "
                    "made of this model with these settings.",
                    f"Build it where it can be built: HATCH_EPCONTEXT_TARGETS={job.target.name}, "
                    "with the same cache folder.",
                )
            )
        return artifact

    def _key(self, job: Job) -> str:
        return self._fingerprint(job, versions_of(job.target, self.versions))

    def _recipe(self, job: Job) -> str:
        """A fingerprint without versions: of what the same settings make, whatever compiles it."""
        return self._fingerprint(job, {})

    def _fingerprint(self, job: Job, versions: Mapping[str, str]) -> str:
        spec = target_spec(job.target)
        models = [
            (
                self.sources[model.name].sha256,
                {
                    "name": model.name,
                    "dims": model.dims,
                    "shapes": model.shapes,
                    "constants": model.constants,
                },
            )
            for model in job.models
        ]
        target = {
            "provider": spec.provider,
            "ep": spec.ep,
            "registration_name": spec.plugin.registration_name if spec.plugin else "",
            "provider_options": spec.provider_options,
            "session_options": spec.session_options,
            "device": spec.device,
            "device_filter": spec.device_filter,
            "policy": spec.policy,
            "virtual_devices": spec.virtual_devices,
            "optimization": spec.optimization,
            "embed": spec.embed,
            "in_memory": spec.in_memory,
            "external_initializers": spec.external_initializers,
        }
        return fingerprint(models, target, versions)

    def _compile(self, job: Job, key: str, scratch: Path) -> Artifact:
        self._check_embeddable(job)
        start = time.monotonic()
        prepared = [prepare(job, model, scratch, self.workers) for model in job.models]
        prepare_seconds = time.monotonic() - start
        made = scratch / "artifact"
        made.mkdir()
        request = CompileRequest(
            models=tuple(map(model_spec, job.models)),
            prepared=tuple(each.path for each in prepared),
            target=target_spec(job.target),
            folder=str(made),
        )
        try:
            reply: CompileReply = self.workers.call(request, scratch / "compile", where=job.where)
        except BuildError as error:
            raise _with_preparations(error, [each.how for each in prepared]) from None
        # Hashed before anything else comes near them.
        files = record_files(made)
        times = Times(prepare_seconds, reply.seconds)
        record = Record(
            reply.product,
            tuple(each.how for each in prepared),
            reply.contexts,
            files,
            versions_of(job.target, self.versions),
            self._measured(job, request, reply, times, scratch),
        )
        artifact = self.cache.store(key, made, record)
        # Copies of whole models, of which a build may have many.
        for folder in scratch.glob("prepared-*"):
            shutil.rmtree(folder)
        return artifact

    def _check_embeddable(self, job: Job) -> None:
        for model in job.models if job.target.embed else ():
            if (size := self.sources[model.name].size) > PROTOBUF_LIMIT:
                raise BuildError(
                    Problem(
                        job.where,
                        f"embed = true puts the compiled blob into an ONNX file, which cannot be larger "
                        f"than 2 GiB, and the model has {size / 2**30:.1f} GiB.",
                        "Leave embed out: the blob is then a file beside the context model.",
                    )
                )

    def _measured(
        self, job: Job, compiled: CompileRequest, reply: CompileReply, times: Times, scratch: Path
    ) -> Times:
        """``times`` with those of loading, for jobs of one model that can be run here."""
        if why := cannot(job) or ("its models share weights" if job.group else ""):
            return replace(times, unmeasured=why)
        request = MeasureRequest(
            compiled.prepared[0], compiled.target, reply.product, reply.contexts[0], compiled.folder
        )
        try:
            measured: MeasureReply = self.workers.call(
                request, scratch / "measure", where=job.where
            )
        except BuildError as error:
            return replace(times, unmeasured="; ".join(p.what for p in error.problems))
        return replace(times, load_source=measured.load_source, load_context=measured.load_context)

    def _prove(
        self, job: Job, model: Model, artifact: Artifact, context: Context, scratch: Path
    ) -> Proof:
        given = without_running(job, model)
        if given and not job.target.from_cache:
            return given
        key = proof_key(job, model)
        kept = self.cache.proof(artifact, key)
        # What had no device of its own then may have one now.
        if kept and (kept.how == "run" or job.target.from_cache):
            return kept
        if given:
            return given
        if job.target.from_cache:
            raise BuildError(
                Problem(
                    f"{job.where}: validation",
                    "HATCH_EPCONTEXT_FROM_CACHE names its target, and what the cache has was not proven "
                    "with these inputs, this tolerance and these options.",
                    f"Build it where it can be built: HATCH_EPCONTEXT_TARGETS={job.target.name}.",
                )
            )
        moved = scratch / f"moved-{model.name}"
        shutil.copytree(artifact.folder, moved, copy_function=link_or_copy)
        request = ValidateRequest(
            model_spec_of(model, job.target),
            target_spec(job.target),
            artifact.record.product,
            context,
            str(moved),
            model.tolerance_for(job.target.provider),
            artifact.record.contexts if job.group else (),
        )
        reply: ValidateReply = self.workers.call(
            request,
            scratch / f"validate-{model.name}",
            where=f"{job.where}: validation",
        )
        shutil.rmtree(moved)
        proof = proof_of(artifact, reply)
        if proof.how != "run" and model.validate == "require":
            raise cannot_run(job, model, reply.absent)
        self.cache.keep_proof(artifact, key, proof)
        return proof


def _with_preparations(error: BuildError, preparations: list[Preparation]) -> BuildError:
    """``error`` with what had failed before it: the cause may be there."""
    told = "".join(
        f"\nThe model was prepared with {preparation.folding}, after this:\n{failure}"
        for preparation in preparations
        for failure in preparation.failed
    )
    return BuildError(*(replace(problem, what=problem.what + told) for problem in error.problems))
