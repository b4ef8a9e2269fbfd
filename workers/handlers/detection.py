"""Where the text is: the segmenter's input and output (differentiable binarisation, "DB").

The model gives each pixel the probability to belong to the shrunken core of a line of text. Cores are cut out of
that map, turned into rectangles, and grown back to the full line.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pyclipper

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL = "segmenter"
INPUT = "x"
OUTPUT = "sigmoid_0.tmp_0"

#: The model halves its input five times.
_MULTIPLE = 32
#: Small pages are enlarged to this short side, large ones reduced to this long side. Pixels.
_SHORT_SIDE = 736
_LONG_SIDE = 1536
#: A pixel of text; a region of text; how far cores are grown (times area over perimeter).
_PIXEL_THRESHOLD = 0.3
_REGION_THRESHOLD = 0.5
_GROWTH = 1.6
#: Regions thinner than this, in pixels of the map, are specks.
_LEAST_SIDE = 3.0
_MOST_REGIONS = 1000
#: Clipper works on integers; this many steps per pixel.
_CLIPPER_STEPS = 64


@dataclass(frozen=True, slots=True)
class Region:
    """One line of text: corners [4, 2] (x, y) in pixels of the page, clockwise from the top left as it lies there."""

    quad: "NDArray[np.float32]"
    score: float


def detector_input(page: "NDArray[np.uint8]") -> "NDArray[np.float32]":
    """[1, 3, H, W] in -1..1; H and W are multiples of 32."""
    height, width = page.shape[:2]
    scale = max(1.0, _SHORT_SIDE / min(height, width))
    scale = min(scale, _LONG_SIDE / max(height, width))
    size = (_to_multiple(width * scale), _to_multiple(height * scale))
    shrinks = size[0] < width
    resized = cv2.resize(page, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    return normalised(np.asarray(resized, np.uint8))[np.newaxis]


def normalised(image: "NDArray[np.uint8]") -> "NDArray[np.float32]":
    """[H, W, 3] in 0..255 to [3, H, W] in -1..1, as all three models were trained."""
    scaled: NDArray[np.float32] = image.astype(np.float32)
    scaled *= np.float32(2 / 255)
    scaled -= np.float32(1)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def regions(probabilities: "NDArray[np.float32]", page_height: int, page_width: int) -> list[Region]:
    """The lines of text in reading order. ``probabilities``: the model's output for one page, [1, 1, H, W]."""
    text = probabilities[0, 0]
    mask = (text > _PIXEL_THRESHOLD).astype(np.uint8)
    # Closes gaps of one pixel, which the map has between strokes of large letters.
    mask = cv2.dilate(mask, np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    scale = np.array([page_width / text.shape[1], page_height / text.shape[0]], np.float32)
    limits = np.array([page_width, page_height], np.float32)
    found = []
    for contour in contours[:_MOST_REGIONS]:
        core = cv2.minAreaRect(contour)
        if min(core[1]) < _LEAST_SIDE:
            continue
        corners = np.asarray(cv2.boxPoints(core), np.float32)
        score = _mean_inside(text, corners)
        if score < _REGION_THRESHOLD:
            continue
        grown = _grown(corners)
        if grown is None:
            continue
        quad = np.clip(_clockwise(grown) * scale, 0, limits)
        found.append(Region(quad.astype(np.float32), round(score, 4)))
    return in_reading_order(found)


def in_reading_order(found: list[Region]) -> list[Region]:
    """From top to bottom; regions beside each other (their heights overlap by half) from left to right."""
    rows: list[list[Region]] = []
    for region in sorted(found, key=_middle):
        if rows and _beside(rows[-1][0], region):
            rows[-1].append(region)
        else:
            rows.append([region])
    return [region for row in rows for region in sorted(row, key=lambda region: float(region.quad[:, 0].min()))]


def _beside(first: Region, second: Region) -> bool:
    top = max(first.quad[:, 1].min(), second.quad[:, 1].min())
    bottom = min(first.quad[:, 1].max(), second.quad[:, 1].max())
    lower = min(np.ptp(first.quad[:, 1]), np.ptp(second.quad[:, 1]))
    return bool(bottom - top > lower / 2)


def _middle(region: Region) -> float:
    return float(region.quad[:, 1].mean())


def _to_multiple(pixels: float) -> int:
    return max(_MULTIPLE, round(pixels / _MULTIPLE) * _MULTIPLE)


def _mean_inside(text: "NDArray[np.float32]", corners: "NDArray[np.float32]") -> float:
    """Mean probability within the rectangle; looks only at its bounding box."""
    height, width = text.shape
    left, top = np.clip(np.floor(corners.min(axis=0)).astype(int), 0, [width - 1, height - 1])
    right, bottom = np.clip(np.ceil(corners.max(axis=0)).astype(int), 0, [width - 1, height - 1])
    inside = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(inside, [np.round(corners - [left, top]).astype(np.int32)], (1,))
    return float(cv2.mean(text[top : bottom + 1, left : right + 1], inside)[0])


def _grown(corners: "NDArray[np.float32]") -> "NDArray[np.float32] | None":
    """The rectangle around ``corners`` moved outwards; None for what is too thin to have an inside."""
    perimeter = cv2.arcLength(corners, closed=True)
    distance = cv2.contourArea(corners) * _GROWTH / perimeter if perimeter else 0.0
    offset = pyclipper.PyclipperOffset()
    path: Any = np.round(corners * _CLIPPER_STEPS).astype(int).tolist()
    offset.AddPath(path, pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    paths = offset.Execute(distance * _CLIPPER_STEPS)
    if len(paths) != 1:
        return None
    around = cv2.minAreaRect(np.array(paths[0], np.float32) / _CLIPPER_STEPS)
    if min(around[1]) < _LEAST_SIDE + 2:
        return None
    return np.asarray(cv2.boxPoints(around), np.float32)


def _clockwise(corners: "NDArray[np.float32]") -> "NDArray[np.float32]":
    """Top left, top right, bottom right, bottom left: of the two left-most corners the upper is the top left."""
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    left = by_x[:2][np.argsort(by_x[:2, 1], kind="stable")]
    right = by_x[2:][np.argsort(by_x[2:, 1], kind="stable")]
    return np.array([left[0], right[0], right[1], left[1]], np.float32)
