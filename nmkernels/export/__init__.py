"""Export of finished models: compressed or dense safetensors, ONNX, AOTInductor packages."""

from ..files import atomic_write
from .graphs import save_aoti, save_onnx
from .safetensors import load_compressed, save_compressed, save_dense

__all__ = ["atomic_write", "load_compressed", "save_aoti", "save_compressed", "save_dense", "save_onnx"]
