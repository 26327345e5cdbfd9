"""Files that a finished model leaves as: compressed safetensors, and dense safetensors whose zeros are N:M."""

from .files import atomic_write
from .safetensors import load_compressed, save_compressed, save_dense

__all__ = ["atomic_write", "load_compressed", "save_compressed", "save_dense"]
