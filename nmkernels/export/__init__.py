"""Files that a finished model leaves as: compressed safetensors, dense safetensors whose zeros are N:M, ONNX, AOTInductor's packages."""

from .files import atomic_write
from .graphs import save_aoti, save_onnx
from .safetensors import load_compressed, save_compressed, save_dense

__all__ = ["atomic_write", "load_compressed", "save_aoti", "save_compressed", "save_dense", "save_onnx"]
