"""One-shot pruning methods, one file each; a new one is registered automatically."""
