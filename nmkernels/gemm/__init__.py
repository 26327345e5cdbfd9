"""Choose how each GEMM of a sparse layer is computed.

A layer describes its GEMMs by a ``GemmPlan``. ``route`` turns that into ``Problem``s, ``choose`` selects a ``Method`` for each by a rule
based on ``estimate``, or by what ``tune`` measured, and the layer caches the resulting ``Route``.
"""
