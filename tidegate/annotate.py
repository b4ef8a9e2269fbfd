"""A page with its regions drawn on it: outline, text, and whether the text stood upside down."""

import io
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

_UPRIGHT = (0, 128, 60)
_TURNED = (200, 40, 0)
_LARGEST_TEXT = 28
#: What is read with less certainty than this is a guess, and not shown to people as text.
_LEGIBLE_SCORE = 0.5


def annotated_png(payload: bytes, result: dict[str, Any]) -> bytes | None:
    """``payload`` (an image) with the ``regions`` of ``result``, as PNG; None where there is nothing to draw.

    A region has ``quad`` (four [x, y] in pixels of the image as it is shown) and perhaps ``text``, ``text_score``,
    and ``orientation`` (degrees).
    """
    regions = result.get("regions")
    if not isinstance(regions, list):
        return None
    try:
        image = _on_paper(ImageOps.exif_transpose(Image.open(io.BytesIO(payload))))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return None
    draw = ImageDraw.Draw(image, "RGBA")
    for number, region in enumerate(regions, start=1):
        _draw(draw, number, region)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def shown_text(region: dict[str, Any]) -> str:
    """The region's ``text`` for people: where it could hardly be read (``text_score``), that instead."""
    score = region.get("text_score")
    if isinstance(score, int | float) and score < _LEGIBLE_SCORE:
        return f"(not legible, score {score:.2f})"
    return str(region.get("text") or "")


def _on_paper(image: Image.Image) -> Image.Image:
    """In colours, what is transparent white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    paper = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(paper, layer).convert("RGB")


def _draw(draw: ImageDraw.ImageDraw, number: int, region: dict[str, Any]) -> None:
    corners = [(float(x), float(y)) for x, y in region["quad"]]
    turned = region.get("orientation") == 180
    colour = _TURNED if turned else _UPRIGHT
    draw.polygon(corners, outline=colour, width=2)
    words = f"{number} {shown_text(region)}{' (180°)' if turned else ''}".strip()
    top, bottom = min(y for _, y in corners), max(y for _, y in corners)
    font = ImageFont.load_default(size=max(10.0, min(float(_LARGEST_TEXT), (bottom - top) * 0.5)))
    left = min(x for x, _ in corners)
    # Below the line, so that the line itself stays readable; moved in at the page's edges.
    box = draw.textbbox((left, bottom + 1), words, font=font)
    shift_x = min(0.0, draw.im.size[0] - 1 - box[2])
    shift_y = min(0.0, draw.im.size[1] - 1 - box[3])
    place = (max(0.0, left + shift_x), max(0.0, bottom + 1 + shift_y))
    draw.rectangle(draw.textbbox(place, words, font=font), fill=(255, 255, 255, 200))
    draw.text(place, words, font=font, fill=colour)
