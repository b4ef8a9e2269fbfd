"""The three vision models run in this process, in place of the gateway: checks the handlers without Triton."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

_FILES = {
    "segmenter": "ch_PP-OCRv4_det_infer.onnx",
    "classifier": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "reader": "ch_PP-OCRv4_rec_infer.onnx",
}


class LocalModels:
    """A JobContext. ``deployments`` gets the reader's labels."""

    def __init__(self, deployments: Path) -> None:
        self.deployments = deployments
        self.calls: list[str] = []
        # Found, not imported: the package's own code has dependencies that are not installed.
        spec = find_spec("rapidocr_onnxruntime")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent / "models"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.log_severity_level = 3
        self._sessions = {
            name: onnxruntime.InferenceSession(str(folder / file), options, providers=["CPUExecutionProvider"])
            for name, file in _FILES.items()
        }
        labels = deployments / "vision" / "models" / "reader" / "labels.txt"
        labels.parent.mkdir(parents=True)
        characters = self._sessions["reader"].get_modelmeta().custom_metadata_map["character"].splitlines()
        labels.write_text("".join(f"{character}\n" for character in characters), encoding="utf-8")

    async def infer(self, model: str, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self.calls.append(model)
        session = self._sessions[model]
        assert all(array.dtype == np.float32 for array in inputs.values())
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    async def cpu(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)
