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
#: A reading below this may be of a line that stands the other way up. Lines read upside down seldom reach 0.6.
CREDIBLE = 0.9
#: Widths are padded to few values, so that lines of several pages share a batch in Triton.
_LEAST_WIDTH = 320
_WIDTH_STEP = 160
_MOST_WIDTH = 3200
#: Lines are squeezed by this before they are read. The model was trained on dense text and overlooks narrow spaces
#: between Latin words; on rendered lines in several typefaces it overlooked fewer of them squeezed than as they were.
_SQUEEZE = 0.7
_BLANK = 0
#: Between two letters, a blank with at least this much probability of a space is one.
_SPACE_THRESHOLD = 0.012


def load_labels(deployments: Path) -> list[str]:
    """The text of each class of the reader: nothing for class 0 (the blank), one label a line, last a space."""
    text = (deployments / "vision" / "models" / MODEL / "labels.txt").read_text(encoding="utf-8")
    # Not splitlines: some labels are themselves separators of lines to Unicode.
    return ["", *text.removesuffix("\n").split("\n"), " "]


def reader_input(line: "NDArray[np.uint8]") -> "NDArray[np.float32]":
    """[1, 3, 48, W]; ``line`` is upright."""
    own_width = math.ceil(_HEIGHT * line.shape[1] / line.shape[0] * _SQUEEZE)
    steps = math.ceil(max(0, own_width - _LEAST_WIDTH) / _WIDTH_STEP)
    return padded(line, _HEIGHT, min(_MOST_WIDTH, _LEAST_WIDTH + steps * _WIDTH_STEP), own_width)


def decode(probabilities: "NDArray[np.float32]", labels: list[str]) -> tuple[str, float]:
    """The text and the mean probability of its letters. ``probabilities``: [1, steps, classes] of one line.

    The likeliest class of each step; repeats of a step are one letter unless a blank stands between. Spaces are
    overlooked rather than invented by the model, so that a blank that may be a space is taken for one.
    """
    steps = probabilities[0]
    space = len(labels) - 1
    classes = steps.argmax(axis=1)
    classes[(classes == _BLANK) & (steps[:, space] >= _SPACE_THRESHOLD)] = space
    is_letter = classes != _BLANK
    is_letter[1:] &= classes[1:] != classes[:-1]
    chosen = np.flatnonzero(is_letter)
    if chosen.size == 0:
        return "", 0.0
    text = "".join(labels[index] for index in classes[chosen])
    # A space that was taken from a blank says nothing about how well the letters were seen.
    letters = chosen[classes[chosen] != space]
    score = float(steps[letters, classes[letters]].mean()) if letters.size else 0.0
    return text.strip(), round(score, 4)
