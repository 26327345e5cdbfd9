"""Export of finished models: compressed or dense safetensors, compressed-tensors' folders, ONNX, AOTInductor packages."""

from ..files import atomic_write as atomic_write
from .compressed_tensors import save_compressed_tensors
from .graphs import save_aoti, save_onnx
from .safetensors import load_compressed as load_compressed
from .safetensors import save_compressed as save_compressed
from .safetensors import save_dense as save_dense

__all__ = ["save_aoti", "save_compressed_tensors", "save_onnx"]
