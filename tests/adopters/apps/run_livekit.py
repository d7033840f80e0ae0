"""livekit-plugins-silero: probabilities and times of speech in a sound file, from its events."""

from __future__ import annotations

import asyncio
import sys
import wave
from functools import partial
from typing import Any

import numpy as np
from livekit import rtc
from livekit.agents.vad import VADEventType
from livekit.plugins.silero import VAD
from watch import report, timed, watch

SECONDS = 6

device, sound = sys.argv[1:]
targets = watch("livekit.plugins.silero", device)


async def events(vad: Any, audio: bytes, rate: int) -> list[Any]:
    stream = vad.stream()
    step = rate // 100 * 2
    for start in range(0, len(audio) - step + 1, step):
        stream.push_frame(rtc.AudioFrame(audio[start : start + step], rate, 1, step // 2))
    stream.end_input()
    return [event async for event in stream]


with wave.open(sound) as file:
    samples = np.frombuffer(file.readframes(SECONDS * file.getframerate()), np.int16)
opened, scores, times = {}, {}, {}
for name, rate in {"16k": 16000, "8k": 8000}.items():
    vad, opened[name] = timed(partial(VAD.load, sample_rate=rate, force_cpu=False))
    # Every second sample instead of resampling, which is not the same each time.
    found = asyncio.run(events(vad, samples[:: 16000 // rate].tobytes(), rate))
    scores[name] = [e.probability for e in found if e.type == VADEventType.INFERENCE_DONE]
    times[name] = [
        {e.type.name: e.samples_index} for e in found if e.type != VADEventType.INFERENCE_DONE
    ]
report(targets=targets(), opened=opened, scores=scores, times=times)
