"""The pure steps around the models: pages, regions, crops, texts."""

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from workers.handlers.detection import Region, detector_input, in_reading_order, regions
from workers.handlers.interface import BadInput
from workers.handlers.orientation import classifier_input, crop, orientation, turned
from workers.handlers.pages import decode_page
from workers.handlers.reading import decode, load_labels, reader_input
from workers.sample_pages import SampleLine, draw_page, sample_pages

LABELS = ["", "a", "b", " "]


def _image(mode: str = "RGB", size: tuple[int, int] = (40, 30), color: object = "red", form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, format=form)  # type: ignore[arg-type]
    return file.getvalue()


def _steps(*likeliest: int, space: dict[int, float] | None = None) -> NDArray[np.float32]:
    """Probabilities of one line; ``space``: probability of a space at a step."""
    steps = np.full((1, len(likeliest), len(LABELS)), 0.01, np.float32)
    for step, index in enumerate(likeliest):
        steps[0, step, index] = 0.9
    for step, probability in (space or {}).items():
        steps[0, step, 3] = probability
    return steps


def _box(left: float, top: float, right: float, bottom: float) -> NDArray[np.float32]:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF"])
def test_pages_of_common_formats_are_blue_green_red(form: str) -> None:
    page = decode_page(_image(form=form))
    assert page.shape == (30, 40, 3)
    assert page.dtype == np.uint8
    assert page[5, 5].argmax() == 2


def test_transparency_is_paper_and_deep_grey_is_scaled() -> None:
    assert decode_page(_image("RGBA", color=(0, 0, 0, 0)))[0, 0].tolist() == [255, 255, 255]
    assert decode_page(_image("I;16", color=0x8000))[0, 0].tolist() == [128, 128, 128]
    assert decode_page(_image("L", color=7))[0, 0].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "empty"),
        (b"not an image at all", "not an image"),
        (_image()[:60], "broken"),
        (_image(size=(300, 300), form="JPEG")[:700], "broken"),
        (_image(size=(4, 400)), "4 x 400"),
        (_image("1", size=(9000, 9000), color=1), "at most 50000000"),
    ],
)
def test_a_bad_page_is_one_clear_sentence(payload: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        decode_page(payload)
    assert "\n" not in str(caught.value)
    assert "/" not in str(caught.value)


@pytest.mark.parametrize("size", [(10, 3000), (3000, 10), (8, 8), (700, 500), (5000, 4000)])
def test_the_segmenter_gets_multiples_of_32_within_bounds(size: tuple[int, int]) -> None:
    tensor = detector_input(np.zeros((*size, 3), np.uint8))
    assert tensor.dtype == np.float32
    assert tensor.shape[:2] == (1, 3)
    assert all(side % 32 == 0 and 32 <= side <= 1536 for side in tensor.shape[2:])


def test_a_core_in_the_map_becomes_a_grown_region_of_the_page() -> None:
    text = np.zeros((1, 1, 320, 640), np.float32)
    text[0, 0, 100:116, 100:400] = 0.9
    text[0, 0, 200:202, 10:13] = 0.9  # a speck
    text[0, 0, 250:266, 100:400] = 0.35  # too weak on the whole
    (region,) = regions(text, 640, 1280)
    left, top = region.quad[0]
    right, bottom = region.quad[2]
    assert 150 < left < 200 < 790 < right < 850
    assert 165 < top < 200 < 225 < bottom < 265
    assert region.score > 0.8
    assert regions(np.zeros((1, 1, 32, 32), np.float32), 10, 10) == []


def test_regions_are_read_row_by_row() -> None:
    boxes = [_box(300, 12, 500, 42), _box(10, 200, 200, 230), _box(10, 10, 200, 40), _box(10, 100, 400, 130)]
    ordered = in_reading_order([Region(box, 1.0) for box in boxes])
    assert [region.quad[0].tolist() for region in ordered] == [[10, 10], [300, 12], [10, 100], [10, 200]]


def test_crops_are_straight_and_a_little_longer() -> None:
    page = np.zeros((100, 300, 3), np.uint8)
    page[40:60, 100:200] = 255
    line = crop(page, _box(100, 40, 200, 60))
    assert line.shape == (20, 105, 3)
    assert line[10, 50].tolist() == [255, 255, 255]
    down = crop(page.transpose(1, 0, 2).copy(), _box(40, 100, 60, 200))
    assert down.shape == line.shape


def test_model_inputs_have_the_shapes_of_the_models() -> None:
    line = np.zeros((20, 100, 3), np.uint8)
    assert classifier_input(line).shape == (2, 3, 48, 192)
    assert classifier_input(line[:, :70]).shape == (1, 3, 48, 192)
    assert classifier_input(np.zeros((1, 9000, 3), np.uint8)).shape == (3, 3, 48, 192)
    assert reader_input(line).shape == (1, 3, 48, 320)
    long_line = np.zeros((20, 100_000, 3), np.uint8)
    assert reader_input(long_line).shape == (1, 3, 48, 3200)
    widths = {reader_input(np.zeros((20, width, 3), np.uint8)).shape[3] for width in range(20, 800, 10)}
    assert len(widths) < 10


def test_orientation_is_the_likelier_way_and_turning_twice_is_nothing() -> None:
    assert orientation(np.array([[0.25, 0.75]], np.float32)) == (180, 0.75)
    assert orientation(np.array([[0.75, 0.25]], np.float32)) == (0, 0.75)
    assert orientation(np.array([[0.75, 0.25], [0.25, 0.75], [0.25, 0.75]], np.float32))[0] == 180
    line = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert (turned(turned(line)) == line).all()
    assert (turned(line)[0, 0] == line[1, 3]).all()


def test_repeats_are_one_letter_unless_a_blank_stands_between() -> None:
    assert decode(_steps(1, 1, 0, 1, 2, 2), LABELS) == ("aab", 0.9)
    assert decode(_steps(0, 0), LABELS) == ("", 0.0)


def test_a_blank_that_may_be_a_space_is_one_but_not_at_the_ends() -> None:
    assert decode(_steps(1, 0, 2, space={1: 0.04}), LABELS) == ("a b", 0.9)
    assert decode(_steps(1, 0, 2, space={1: 0.011}), LABELS) == ("ab", 0.9)
    assert decode(_steps(0, 1, 3, 2, 0, space={0: 0.5, 4: 0.5}), LABELS) == ("a b", 0.9)
    assert decode(_steps(0, 0, space={0: 0.5}), LABELS) == ("", 0.0)


def test_labels_may_be_any_character(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    file = folder / "vision" / "models" / "reader" / "labels.txt"
    file.parent.mkdir(parents=True)
    file.write_text("a\n\u2028\n\u3000\nb\n", encoding="utf-8")
    assert load_labels(folder) == ["", "a", "\u2028", "\u3000", "b", " "]


def test_sample_pages_are_the_same_each_time() -> None:
    first, second = sample_pages(), sample_pages()
    assert first == second
    assert {line.orientation for page in first for line in page.lines} == {0, 180}
    upright = draw_page("a", (SampleLine("turn"),))
    down = draw_page("a", (SampleLine("turn", orientation=180),))
    assert upright.png != down.png
