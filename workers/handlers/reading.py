"""What a line says: the reader's input and output (connectionist temporal classification, "CTC")."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workers.handlers.orientation import padded

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL = "reader"
INPUT = "x"
OUTPUT = "softmax_11.tmp_0"

_HEIGHT = 48
#: Widths are padded to few values, so that lines of several pages share a batch in Triton.
_LEAST_WIDTH = 320
_WIDTH_STEP = 160
_MOST_WIDTH = 3200
_BLANK = 0


def load_labels(deployments: Path) -> list[str]:
    """The text of each class of the reader: nothing for class 0 (the blank), one label a line, last a space."""
    text = (deployments / "vision" / "models" / MODEL / "labels.txt").read_text(encoding="utf-8")
    # Not splitlines: some labels are themselves separators of lines to Unicode.
    return ["", *text.removesuffix("\n").split("\n"), " "]


def reader_input(line: "NDArray[np.uint8]") -> "NDArray[np.float32]":
    """[1, 3, 48, W]; ``line`` is upright."""
    own_width = _HEIGHT * line.shape[1] / line.shape[0]
    steps = math.ceil(max(0.0, own_width - _LEAST_WIDTH) / _WIDTH_STEP)
    return padded(line, _HEIGHT, min(_MOST_WIDTH, _LEAST_WIDTH + steps * _WIDTH_STEP))


def decode(probabilities: "NDArray[np.float32]", labels: list[str]) -> tuple[str, float]:
    """The text and the mean probability of its letters. ``probabilities``: [1, steps, classes] of one line.

    The likeliest class of each step; repeats of a step are one letter unless a blank stands between.
    """
    steps = probabilities[0]
    classes = steps.argmax(axis=1)
    is_letter = classes != _BLANK
    is_letter[1:] &= classes[1:] != classes[:-1]
    chosen = np.flatnonzero(is_letter)
    if chosen.size == 0:
        return "", 0.0
    text = "".join(labels[index] for index in classes[chosen])
    return text, round(float(steps[chosen, classes[chosen]].mean()), 4)
