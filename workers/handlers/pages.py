"""Pages as pixels: from the bytes of an image file to an array, or to one clear sentence."""

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from workers.handlers.interface import BadInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF")
#: A page of A3 at 400 dpi has 31 million. Checked against the file's head, before any pixel is decoded.
_MOST_PIXELS = 50_000_000
_LEAST_SIDE = 8


def decode_page(payload: bytes) -> "NDArray[np.uint8]":
    """The page as [height, width, 3], 8 bits, channel order blue-green-red (as the models were trained).

    Turned upright where the file says how it was held; transparency becomes white paper; of several frames the first.

    Raises:
        BadInput: empty, not an image, broken, or of a size that is refused.
    """
    if not payload:
        raise BadInput("the file is empty")
    try:
        with Image.open(io.BytesIO(payload), formats=_FORMATS) as image:
            _check_size(*image.size)
            image.load()
            return _as_array(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise BadInput(f"the file is not an image of a known format ({', '.join(_FORMATS)})") from error
    except Image.DecompressionBombError as error:
        raise BadInput(f"the image has more than {_MOST_PIXELS} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow tells of broken files in all of these ways.
        raise BadInput("the image is broken: its pixels cannot be decoded") from error


def _check_size(width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise BadInput(f"the image has {width} x {height} pixels; at most {_MOST_PIXELS} are accepted")
    if min(width, height) < _LEAST_SIDE:
        raise BadInput(f"the image has {width} x {height} pixels; each side needs at least {_LEAST_SIDE}")


def _as_array(image: Image.Image) -> "NDArray[np.uint8]":
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    elif image.mode.startswith("I;16"):
        # Pillow would clip 16 bits instead of scaling them.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1])
