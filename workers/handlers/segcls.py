"""Queue ``segcls``: a page in, its lines of text out: where, which way up, and what they say.

Result: that of ``segment``, and in each region ``orientation`` (degrees, 0 or 180), ``orientation_score``, ``text`` and
``text_score``. All lines of a page are asked for at once, so that Triton can batch them.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wire.jobs import Job
from workers.handlers import orientation, reading
from workers.handlers.interface import JobContext
from workers.handlers.segment import page_result, region_result, segment
from workers.handlers.stages import Stages

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Line:
    """One crop and what the classifier says of it."""

    pixels: "NDArray[np.uint8]"
    turned: int
    score: float


async def handle(job: Job, context: JobContext) -> dict[str, Any]:
    """Raises BadInput when the payload is no image."""
    stages = Stages()
    page = await segment(job, context, stages)
    with stages.stage("classify"):
        lines = await asyncio.gather(*(_classify(page.pixels, region.quad, context) for region in page.regions))
    with stages.stage("read"):
        labels = await context.cpu(reading.load_labels, context.deployments)
        texts = await asyncio.gather(*(_read(line, labels, context) for line in lines))
    found = [region_result(region) | text for region, text in zip(page.regions, texts, strict=True)]
    return page_result(page, found, stages)


async def _classify(page: "NDArray[np.uint8]", quad: "NDArray[np.float32]", context: JobContext) -> _Line:
    pixels = await context.cpu(orientation.crop, page, quad)
    tensor = await context.cpu(orientation.classifier_input, pixels)
    outputs = await context.infer(orientation.MODEL, {orientation.INPUT: tensor})
    return _Line(pixels, *orientation.orientation(outputs[orientation.OUTPUT]))


async def _read(line: _Line, labels: list[str], context: JobContext) -> dict[str, Any]:
    """The line's text, upright. Where classifier or reading leave doubt, both ways are read and the better is kept."""
    best = await _read_turned(line, line.turned, labels, context)
    if line.score < orientation.SURE or best[2] < reading.CREDIBLE:
        other = await _read_turned(line, 180 - line.turned, labels, context)
        best = max(best, other, key=lambda found: found[2])
    way, text, text_score = best
    return {
        "orientation": way,
        "orientation_score": round(line.score if way == line.turned else 1 - line.score, 4),
        "text": text,
        "text_score": text_score,
    }


async def _read_turned(line: _Line, degrees: int, labels: list[str], context: JobContext) -> tuple[int, str, float]:
    upright = orientation.turned(line.pixels) if degrees else line.pixels
    tensor = await context.cpu(reading.reader_input, upright)
    outputs = await context.infer(reading.MODEL, {reading.INPUT: tensor})
    text, score = await context.cpu(reading.decode, outputs[reading.OUTPUT], labels)
    return degrees, text, score
