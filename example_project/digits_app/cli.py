"""``digits-app IMAGE``: prints the digit, and the target that the model ran on."""

from __future__ import annotations

import argparse
import sys

from PIL import UnidentifiedImageError

from digits_app.classify import classify, read_image
from digits_app.epcontext import LoadError, explain, load, target_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="digits-app", description="Read a handwritten digit.")
    parser.add_argument("image", help="an image file of one digit")
    parser.add_argument(
        "--device",
        choices=["npu", "gpu", "cpu", "any"],
        help='the device to use ("any" also accepts a simulated NPU); default: the best one',
    )
    parser.add_argument("--explain", action="store_true", help="print the reason for each target")
    arguments = parser.parse_args()
    try:
        image = read_image(arguments.image)
        session = load("digits", device=arguments.device)
    except (OSError, UnidentifiedImageError, LoadError) as error:
        print(f"digits-app: {error}", file=sys.stderr)
        return 1
    digit, confidence = classify(session, image)
    print(f"{digit} ({confidence:.1%} sure, on {target_of(session)})")
    if arguments.explain:
        for attempt in explain("digits", device=arguments.device):
            print(f"  {attempt}")
    return 0
