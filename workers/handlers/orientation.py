"""Which way up a line stands: crops of lines, the classifier's input and output, and turning them upright."""

import math
from typing import TYPE_CHECKING

import cv2
import numpy as np

from workers.handlers.detection import normalised

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL = "classifier"
INPUT = "x"
OUTPUT = "save_infer_model/scale_0.tmp_1"

_HEIGHT, _WIDTH = 48, 192
#: A long line is judged by this many windows of it: squeezed into one it is judged wrong now and then.
_MOST_WINDOWS = 3
#: Below this the classifier is in doubt.
SURE = 0.95
#: Lines are cut out this much longer at both ends (times their height): regions tend to cut a final stop off.
_LONGER = 0.12
#: A crop this much taller than wide holds a line that runs up or down the page.
_UPRIGHT_RATIO = 1.5


def crop(page: "NDArray[np.uint8]", quad: "NDArray[np.float32]") -> "NDArray[np.uint8]":
    """The line within ``quad``, straightened: [height, width, 3]. Lines that run down the page are laid flat."""
    quad = _longer(quad)
    width = max(1, round(max(_length(quad[0], quad[1]), _length(quad[3], quad[2]))))
    height = max(1, round(max(_length(quad[0], quad[3]), _length(quad[1], quad[2]))))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    warp = cv2.getPerspectiveTransform(quad.astype(np.float32), target)
    line = cv2.warpPerspective(page, warp, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    if height >= width * _UPRIGHT_RATIO:
        line = cv2.rotate(line, cv2.ROTATE_90_COUNTERCLOCKWISE)
    return np.asarray(line, np.uint8)


def classifier_input(line: "NDArray[np.uint8]") -> "NDArray[np.float32]":
    """[windows, 3, 48, 192]: the line, or windows from its start to its end if it is longer than the model is wide;
    padded on the right with the middle of the range, as the model was trained."""
    height, width = line.shape[:2]
    window = max(1, height * _WIDTH // _HEIGHT)
    count = min(_MOST_WINDOWS, math.ceil(width / window))
    starts = np.linspace(0, max(0, width - window), count).astype(int)
    parts = [line[:, start : start + window] for start in starts]
    own_width = math.ceil(_HEIGHT * min(width, window) / height)
    return np.concatenate([padded(part, _HEIGHT, _WIDTH, own_width) for part in parts])


def orientation(probabilities: "NDArray[np.float32]") -> tuple[int, float]:
    """Degrees (0 or 180) by which the line stands turned, and the probability of that.

    ``probabilities``: [windows, 2], of standing upright and of standing upside down.
    """
    upright, upside_down = (float(probability) for probability in probabilities.mean(axis=0))
    return (180, upside_down) if upside_down > upright else (0, upright)


def turned(line: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
    """The line turned by 180 degrees."""
    return np.ascontiguousarray(line[::-1, ::-1])


def padded(line: "NDArray[np.uint8]", height: int, width: int, own_width: int) -> "NDArray[np.float32]":
    """[1, 3, height, width]: the line scaled to ``own_width`` (at most ``width``), zeros beside it."""
    own_width = min(width, max(1, own_width))
    shrinks = line.shape[0] > height
    # Small letters stay apart when they are enlarged with cubic curves; linear ones smear the spaces between words.
    resized = cv2.resize(line, (own_width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC)
    tensor = np.zeros((1, 3, height, width), np.float32)
    tensor[0, :, :, :own_width] = normalised(np.asarray(resized, np.uint8))
    return tensor


def _longer(quad: "NDArray[np.float32]") -> "NDArray[np.float32]":
    """``quad`` with its short sides moved outwards."""
    across, down = _length(quad[0], quad[1]), _length(quad[0], quad[3])
    # Two corners at each end of the line: left and right, or top and bottom for lines that run down the page.
    starts, ends = ((0, 3), (1, 2)) if across >= down else ((0, 1), (3, 2))
    longer = quad.copy()
    for start, end in zip(starts, ends, strict=True):
        length = _length(quad[start], quad[end])
        if length > 0:
            shift = (quad[end] - quad[start]) / length * min(across, down) * _LONGER
            longer[start] -= shift
            longer[end] += shift
    return longer


def _length(start: "NDArray[np.float32]", end: "NDArray[np.float32]") -> float:
    return float(np.hypot(*(end - start)))
