"""Queue ``segment``: a page in, the regions of text out.

Result: ``{"page": {"width", "height"}, "regions": [{"quad": [[x, y] * 4], "score"}], "milliseconds": {stage: time}}``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wire.jobs import Job
from workers.handlers import detection, pages
from workers.handlers.detection import Region
from workers.handlers.interface import JobContext
from workers.handlers.stages import Stages

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SegmentedPage:
    """A page and its regions in reading order."""

    pixels: "NDArray[np.uint8]"
    regions: list[Region]


async def handle(job: Job, context: JobContext) -> dict[str, Any]:
    """Raises BadInput when the payload is no image."""
    stages = Stages()
    page = await segment(job, context, stages)
    return page_result(page, [region_result(region) for region in page.regions], stages)


async def segment(job: Job, context: JobContext, stages: Stages) -> SegmentedPage:
    with stages.stage("decode"):
        pixels = await context.cpu(pages.decode_page, job.payload)
    with stages.stage("segment"):
        tensor = await context.cpu(detection.detector_input, pixels)
        outputs = await context.infer(detection.MODEL, {detection.INPUT: tensor})
        height, width = pixels.shape[:2]
        regions = await context.cpu(detection.regions, outputs[detection.OUTPUT], height, width)
    return SegmentedPage(pixels, regions)


def page_result(page: SegmentedPage, regions: list[dict[str, Any]], stages: Stages) -> dict[str, Any]:
    height, width = page.pixels.shape[:2]
    return {
        "page": {"width": width, "height": height},
        "regions": regions,
        "milliseconds": stages.milliseconds,
    }


def region_result(region: Region) -> dict[str, Any]:
    quad = [[round(float(x), 1), round(float(y), 1)] for x, y in region.quad]
    return {"quad": quad, "score": region.score}
