"""How a GEMM of a sparse layer is done: its description, the methods, an estimate of each, and the one place that chooses.

A layer describes its GEMMs by a ``GemmPlan``; ``route`` makes ``Problem``s of it, ``choose`` takes a ``Method`` for each, by the rule of
``estimate`` or what ``tune`` has measured, and the layer remembers the ``Route``.
"""
