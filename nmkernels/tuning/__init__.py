"""Layer 2: the one place that measures and remembers."""
