"""Further methods from the literature, one file each; ``recipes`` imports every file.

They are tested like all others, against their papers' equations; their keywords may change between versions.
"""
