"""Builds a small language model of each architecture, with random weights, for each target.

    python -m benchmarks.architectures --builder PYTHON            # all
    python -m benchmarks.architectures --builder PYTHON gemma2     # one

``PYTHON`` is that of an environment with onnxruntime-genai, torch and transformers: its model builder writes
the folders. For RTX libcuda.so.1 is needed, but no GPU. ``--write`` writes ``benchmarks/architectures.json``,
of which the table in ``docs/language-models.md`` is made.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.language_models import TEMPLATE, tokenizer

FILE = Path(__file__).with_suffix(".json")

_SIZES: Mapping[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # The builder quantizes no shared embedding for RTX.
    "tie_word_embeddings": False,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_WINDOWS = {"sliding_window": 64, "query_pre_attn_scalar": 32}

# By default it is 1, and the attention nearly a choice.
_SCALED = {"attention_multiplier": 32**-0.5}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ernie4_5": ("Ernie4_5Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", _WINDOWS),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**_WINDOWS, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    ),
    "gptoss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", _SCALED),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_SCALED,
            "layer_types": ["attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
        },
    ),
    "hunyuandensev1": ("HunYuanDenseV1Config", {}),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "nemotron": ("NemotronConfig", {}),
    "olmo": ("OlmoConfig", {}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 256, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
}
"""The class of each architecture's configuration in transformers, and what is not as in most."""

COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "cpu": ("cpu", "cpu", "fp32"),
    "qnn, fp32": ("qnn", "cpu", "fp32"),
    "qnn, int4": ("qnn", "cpu", "int4"),
    "tensorrt-rtx, fp16": ("tensorrt-rtx", "NvTensorRtRtx", "fp16"),
    "tensorrt-rtx, int4": ("tensorrt-rtx", "NvTensorRtRtx", "int4"),
}
"""The provider of each column, and the flags -e and -p of the model builder."""

_TARGETS = {
    "cpu": 'provider = "cpu"',
    "qnn": 'provider = "qnn", chip = "snapdragon-x-elite"',
    "tensorrt-rtx": 'provider = "tensorrt-rtx", chip = ["rtx-30", "rtx-40", "rtx-50"]',
}


def write_folders(root: Path, name: str) -> None:
    """Write the folders of the architecture ``name`` into ``root``; runs in the builder's environment."""
    torch, transformers, builder = map(
        importlib.import_module, ("torch", "transformers", "onnxruntime_genai.models.builder")
    )
    class_, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, class_)(**_SIZES, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.dim() > 1:
                values.normal_(0, 0.15)
    source = root / "source"
    model.save_pretrained(source)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    for file, content in {"tokenizer": tokenizer(), "tokenizer_config": about}.items():
        (source / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    for ep, precision in dict.fromkeys(column[1:] for column in COLUMNS.values()):
        places = (
            "",
            str(source),
            str(root / f"{ep}-{precision}"),
            precision,
            ep,
            str(root / "cache"),
        )
        try:
            options = builder.parse_extra_options(*places, ["hf_token=false"])
            builder.create_model(*places, **options)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".replace(str(root), "")
            (root / f"{ep}-{precision}.txt").write_text(reason, encoding="utf-8")


def built(folder: Path, provider: str, root: Path) -> dict[str, Any]:
    """How a build of ``folder`` for ``provider`` ends: with nodes and answers, or with a reason."""
    from hatch_epcontext.cache.build import Cache
    from hatch_epcontext.config.load import load
    from hatch_epcontext.errors import EpcontextError
    from hatch_epcontext.jobs.plan import plan
    from hatch_epcontext.jobs.run import build

    if not (folder / "genai_config.json").is_file():
        reason = folder.with_name(f"{folder.name}.txt").read_text(encoding="utf-8")
        return {"builder": reason.partition("\n")[0]}
    target = dict(part.split(" = ", 1) for part in _TARGETS[provider].split(", ", 1))
    table = {
        "models": [{"path": folder.name, "name": "llm", "context-length": 160}],
        "targets": {"only": {key: json.loads(text) for key, text in target.items()}},
    }
    try:
        config = load(folder.parent, table, {}, {})
        result = build(plan(config), root, Cache(None, print), print)
    except EpcontextError as error:
        problem = error.problems[0]
        return {"refused": problem.kind.id, "why": problem.message.partition("\n")[0]}
    contexts = [context for job in result.built for context in job.record.contexts]
    coverages = [context.coverage for context in contexts if context.coverage is not None]
    answers = [answer.snr for job in result.built for answer in job.answers]
    return {
        "nodes": [f"{coverage.compiled}/{coverage.nodes}" for coverage in coverages],
        **({"answers": round(min(answers))} if answers else {}),
    }


def row_of(name: str, builder: Path) -> dict[str, Any]:
    """What the builds of the architecture ``name`` make, by column."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary).resolve()
        command = (builder, "-m", "benchmarks.architectures", "--folders", root, name)
        log = root / "log.txt"
        with log.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=file, check=False)
        if done.returncode:
            sys.exit(log.read_text(encoding="utf-8", errors="replace")[-4000:])
        row = {}
        for index, (column, (provider, ep, precision)) in enumerate(COLUMNS.items()):
            out = root / f"out-{index}"
            out.mkdir()
            row[column] = built(root / f"{ep}-{precision}", provider, out)
            print(f"{name} for {column}: {row[column]}", flush=True)
    return row


def versions(builder: Path) -> dict[str, str]:
    """The versions of what writes the folders, and of what compiles them."""
    lines = []
    for python, names in (
        (builder, ("onnxruntime-genai", "transformers", "torch")),
        (Path(sys.executable), ("onnxruntime", "onnxruntime-qnn", "tensorrt-rtx-cu13-libs")),
    ):
        code = "import sys, importlib.metadata as m\nfor n in sys.argv[1:]: print(n, m.version(n))"
        command = (python, "-c", code, *names)
        lines += subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    return dict(line.split() for line in lines)


def main() -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *ARCHITECTURES], default=[])
    parser.add_argument("--builder", type=Path, default=Path(sys.executable))
    parser.add_argument("--folders", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    names = arguments.names or [*ARCHITECTURES]
    if arguments.folders:
        write_folders(arguments.folders, *names)
        return
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    rows = {name: row_of(name, arguments.builder) for name in names}
    if arguments.write:
        content = {"versions": versions(arguments.builder), "architectures": rows}
        FILE.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
