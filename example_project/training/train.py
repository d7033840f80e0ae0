# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "onnx", "onnxscript", "onnxruntime", "scikit-learn", "pillow"]
# ///
"""Train the model of digits-app, and write ``models/digits.onnx`` and ``samples/*.png``.

    pip install torch==2.13.0 onnx onnxscript onnxruntime scikit-learn pillow
    python training/train.py

The data are scikit-learn's digits: 1797 images of 8 x 8 pixels from 0 to 16. All randomness is seeded:
the same versions on the same kind of machine write the same file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

HERE = Path(__file__).resolve().parents[1]
MODEL = HERE / "models" / "digits.onnx"
SEED = 7
HELD_OUT = 0.25
EPOCHS = 60


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images, held-out images, training digits, held-out digits.

    Images are float32, N x 1 x 8 x 8, from 0 to 1. The package's tests use the same held-out quarter.
    """
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[:, None]
    return train_test_split(
        images, data.target, test_size=HELD_OUT, random_state=SEED, stratify=data.target
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    batches = EPOCHS * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=batches)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            # With noise, the network does not learn how the scanner looks.
            noisy = images[batch] + 0.05 * torch.randn_like(images[batch])
            loss = nn.functional.cross_entropy(model(noisy), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def export(model: nn.Module) -> None:
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 1, 8, 8),),
        dynamo=True,
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    proto = program.model_proto
    # The exporter records where each node came from: full of paths, and of no use in the model.
    del proto.graph.metadata_props[:]
    for part in (*proto.graph.node, *proto.graph.value_info, *proto.graph.initializer):
        del part.metadata_props[:]
    for node in proto.graph.node:
        node.doc_string = ""
    onnx.checker.check_model(proto, full_check=True)
    MODEL.parent.mkdir(exist_ok=True)
    onnx.save(proto, MODEL)


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    train_images, held_images, train_labels, held_labels = digits()
    model = train(torch.from_numpy(train_images), torch.from_numpy(train_labels))
    export(model)
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": held_images})
    accuracy = (logits.argmax(1) == held_labels).mean()
    print(f"accuracy {accuracy:.2%} on {len(held_labels)} held-out digits")
    print(f"wrote {MODEL} ({MODEL.stat().st_size} bytes)")
    samples = HERE / "samples"
    samples.mkdir(exist_ok=True)
    for digit in (3, 7):
        image = held_images[held_labels == digit][0, 0]
        dark = Image.fromarray((255 - image * 255).astype(np.uint8))
        dark.resize((128, 128), Image.Resampling.NEAREST).save(samples / f"{digit}.png")


if __name__ == "__main__":
    main()
