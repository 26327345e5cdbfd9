"""What one-shot pruning loses on pretrained models, and what it costs: ``python -m bench.oneshot run | layers | table``.

models     the pretrained models, their data and what is measured of them
cells      the plan, and one cell of it: (model, pattern, method, recipe, seed) to a row of ``bench/results/oneshot.csv``
layers     seconds and memory of one 4096×4096 layer, to ``bench/results/oneshot_layers.csv``
page       the tables of ``docs/guides/oneshot.md``

``python -m bench.accuracy fetch oneshot sentiment`` downloads the models and texts, once.
"""
