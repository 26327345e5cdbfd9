"""The former place of ``nmkernels.prune.folder``, for one release."""

from ..prune.folder import PrunedFolder, prune_folder

__all__ = ["PrunedFolder", "prune_folder"]
