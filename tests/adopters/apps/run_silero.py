"""silero-vad: the probabilities and times of speech in a sound file, as its own functions return them."""

from __future__ import annotations

import sys
import wave
from functools import partial

import numpy as np
import torch
from silero_vad import get_speech_timestamps, load_silero_vad
from watch import report, timed, watch

SECONDS = 6

device, sound = sys.argv[1:]
targets = watch("silero_vad", device)
with wave.open(sound) as file:
    samples = np.frombuffer(file.readframes(SECONDS * file.getframerate()), np.int16) / 32768
audio = torch.tensor(samples, dtype=torch.float32)
# At both rates for the model of all rates.
cases = {"any-16k": (16, 16000), "any-8k": (16, 8000), "16k": (15, 16000)}
opened, scores, times = {}, {}, {}
for name, (opset, rate) in cases.items():
    given = audio[:: 16000 // rate]
    model, opened[name] = timed(partial(load_silero_vad, onnx=True, opset_version=opset))
    scores[name] = model.audio_forward(given, rate)[0].tolist()
    times[name] = get_speech_timestamps(given, model, sampling_rate=rate)
report(targets=targets(), opened=opened, scores=scores, times=times)
