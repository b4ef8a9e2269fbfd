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
#: Below this the classifier is in doubt.
SURE = 0.9
#: A crop this much taller than wide holds a line that runs up or down the page.
_UPRIGHT_RATIO = 1.5


def crop(page: "NDArray[np.uint8]", quad: "NDArray[np.float32]") -> "NDArray[np.uint8]":
    """The line within ``quad``, straightened: [height, width, 3]. Lines that run down the page are laid flat."""
    width = max(1, round(max(_length(quad[0], quad[1]), _length(quad[3], quad[2]))))
    height = max(1, round(max(_length(quad[0], quad[3]), _length(quad[1], quad[2]))))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    warp = cv2.getPerspectiveTransform(quad.astype(np.float32), target)
    line = cv2.warpPerspective(page, warp, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    if height >= width * _UPRIGHT_RATIO:
        line = cv2.rotate(line, cv2.ROTATE_90_COUNTERCLOCKWISE)
    return np.asarray(line, np.uint8)


def classifier_input(line: "NDArray[np.uint8]") -> "NDArray[np.float32]":
    """[1, 3, 48, 192]; padded on the right with the middle of the range, as the model was trained."""
    return padded(line, _HEIGHT, _WIDTH)


def orientation(probabilities: "NDArray[np.float32]") -> tuple[int, float]:
    """Degrees (0 or 180) by which the line stands turned, and the probability of that; ``probabilities`` is [1, 2]."""
    upright, turned = (float(probability) for probability in probabilities[0])
    return (180, turned) if turned > upright else (0, upright)


def turned(line: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
    """The line turned by 180 degrees."""
    return np.ascontiguousarray(line[::-1, ::-1])


def padded(line: "NDArray[np.uint8]", height: int, width: int) -> "NDArray[np.float32]":
    """[1, 3, height, width]: the line scaled to that height (squeezed if it would be wider), zeros beside it."""
    own_width = min(width, max(1, math.ceil(height * line.shape[1] / line.shape[0])))
    shrinks = line.shape[0] > height
    resized = cv2.resize(line, (own_width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    tensor = np.zeros((1, 3, height, width), np.float32)
    tensor[0, :, :, :own_width] = normalised(np.asarray(resized, np.uint8))
    return tensor


def _length(start: "NDArray[np.float32]", end: "NDArray[np.float32]") -> float:
    return float(np.hypot(*(end - start)))
