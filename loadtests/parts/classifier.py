"""A real model: lines cut out of the sample pages, and which way up they stand. Does the gateway keep batches full?"""

import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tritonclient.http as triton

from loadtests.envoy import envoy
from loadtests.measured import Measured, Side
from loadtests.report import Outcome, at_least
from loadtests.rounds import in_turns, per_second
from loadtests.setup import Setup
from loadtests.work import http_infer
from workers.handlers import detection, orientation, pages
from workers.sample_pages import sample_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = "classifier"
_ROUNDS = 4
_SECONDS = 3.0
_CALLERS = 32
_VISION = Path("deployments/vision")
_POOL: dict[str, object] = {
    "models": [{"name": detection.MODEL}, {"name": orientation.MODEL}],
    "scaling": {"min_replicas": 1, "max_replicas": 1},
}


def measure(setup: Setup) -> Outcome:
    outcome = Outcome(NAME)
    with setup.system("classifier", setup.pool("vision", _VISION, _POOL)) as system:
        direct = system.replicas(1)[0]
        work = http_infer(orientation.MODEL, orientation.INPUT, _crops(direct))
        batches: dict[str, list[float]] = {}

        def run(side: Side, seconds: float) -> Measured:
            # Crops differ, so our own client sends them: h2load knows one body.
            before = _executed(direct)
            measured = setup.closed_loop.run(work, side, connections=_CALLERS, seconds=seconds)
            inferences, executions = (now - then for now, then in zip(_executed(direct), before, strict=True))
            batches.setdefault(side.name, []).append(inferences / max(1, executions))
            return measured

        with envoy(setup.folder / "envoy-classifier", [direct]) as proxy:
            sides = [direct, system.gateway(), proxy]
            series = in_turns(f"classifier, crops, {_CALLERS} callers", sides, _ROUNDS, _SECONDS, run)
    outcome.add(series)
    for side, means in batches.items():
        outcome.figure(f"{series.name}: {side} mean batch", means[1:], "requests")  # the first was the warm-up
    pairs = zip(batches["gateway"][1:], batches["direct"][1:], strict=True)
    speed, fuller = series.ratio("gateway", "direct", per_second), [one / two for one, two in pairs]
    outcome.target(f"{series.name}: requests/s gateway/direct", speed, "ratio", at_least(0.97))
    outcome.target(f"{series.name}: mean batch gateway/direct", fuller, "ratio", at_least(1.0))
    return outcome


def _crops(direct: Side) -> "list[NDArray[np.float32]]":
    """Every line of the sample pages, as the classifier takes it: [1, 3, 48, 192] each."""
    crops: list[NDArray[np.float32]] = []
    with triton.InferenceServerClient(direct.http) as client:
        for page in sample_pages():
            pixels = pages.decode_page(page.png)
            tensor = detection.detector_input(pixels)
            asked = triton.InferInput(detection.INPUT, tensor.shape, "FP32")
            asked.set_data_from_numpy(tensor)
            found = client.infer(detection.MODEL, [asked]).as_numpy(detection.OUTPUT)
            for region in detection.regions(found, *pixels.shape[:2]):
                windows = orientation.classifier_input(orientation.crop(pixels, region.quad))
                crops += [window[np.newaxis] for window in windows]
    return crops


def _executed(direct: Side) -> tuple[int, int]:
    """Inferences of the classifier so far, and executions they were batched into."""
    with urllib.request.urlopen(f"http://{direct.http}/v2/models/{orientation.MODEL}/stats") as answer:
        stats = json.load(answer)["model_stats"][0]
    return int(stats["inference_count"]), int(stats["execution_count"])
