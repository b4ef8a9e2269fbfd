"""Sample pages with a known text, drawn the same way each time: for the demo and for tests."""

import io
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

_MARGIN = 60
_INK = (24, 24, 32)
_PAPER = (250, 249, 245)


@dataclass(frozen=True, slots=True)
class SampleLine:
    """One line of text. ``orientation`` in degrees: 0 stands upright, 180 upside down."""

    text: str
    orientation: int = 0
    size: int = 32
    """Height of the letters as fonts measure it. Pixels."""


@dataclass(frozen=True, slots=True)
class SamplePage:
    """A page as a PNG file, and its lines from top to bottom."""

    name: str
    png: bytes
    lines: tuple[SampleLine, ...]


def sample_pages() -> list[SamplePage]:
    """The pages of the demo: all upright, some lines upside down, and a whole page upside down."""
    return [
        draw_page(
            "upright.png",
            (
                SampleLine("Inference at the gate", size=48),
                SampleLine("Requests wait here while a replica wakes up."),
                SampleLine("A job is claimed, worked on and finished once."),
                SampleLine("Invoice 2047-11 of 3 March, total 1,284.50", size=28),
                SampleLine("Every decision is stored with its reason.", size=28),
            ),
        ),
        draw_page(
            "mixed.png",
            (
                SampleLine("Some lines stand upside down", size=44),
                SampleLine("Turn the page to read this line", orientation=180),
                SampleLine("This one is upright again"),
                SampleLine("The scanner took the sheet the wrong way", orientation=180, size=28),
                SampleLine("Order 77120, shelf 14, box 9", size=36),
                SampleLine("Handle with care", orientation=180, size=40),
            ),
        ),
        draw_page(
            "upside-down.png",
            (
                SampleLine("thank you and good night", orientation=180, size=36),
                SampleLine("From zero to many and back again", orientation=180),
                SampleLine("The tide comes in, the tide goes out", orientation=180),
                SampleLine("Page three of three", orientation=180, size=44),
            ),
        ),
    ]


def draw_page(name: str, lines: tuple[SampleLine, ...], *, width: int = 900) -> SamplePage:
    """A page of that width with one line below the other."""
    drawn = [_draw_line(line) for line in lines]
    height = 2 * _MARGIN + sum(image.height + line.size for image, line in zip(drawn, lines, strict=True))
    page = Image.new("RGB", (width, height), _PAPER)
    top = _MARGIN
    for image, line in zip(drawn, lines, strict=True):
        page.paste(image, (_MARGIN, top))
        top += image.height + line.size
    file = io.BytesIO()
    page.save(file, format="PNG")
    return SamplePage(name, file.getvalue(), lines)


def _draw_line(line: SampleLine) -> Image.Image:
    font = ImageFont.load_default(size=line.size)
    left, top, right, bottom = font.getbbox(line.text)
    image = Image.new("RGB", (int(right - left) + 4, int(bottom - top) + 4), _PAPER)
    ImageDraw.Draw(image).text((2 - left, 2 - top), line.text, font=font, fill=_INK)
    return image.rotate(line.orientation) if line.orientation else image
