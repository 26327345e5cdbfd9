"""How good are the models that each recipe leaves? The same small models trained with every recipe, pattern and seed.

``python -m bench.accuracy run`` trains the missing runs of the plan, and ``... status`` shows its progress. The files:

========== ==========================================================================================================
tasks/     what is trained: model, batches and evaluation; one file per task
data       what the tasks download: ``python -m bench.accuracy fetch``
catalogs   the data of the task ``translation``: texts in two languages, read, cleaned and split
methods    how it is trained: names of methods, and their recipes
spec       the full description of a run: task, method, pattern, seed, learning rate, steps, optimizer, β₂
plan       the runs in order: the search for learning rates, the tuned runs, controls, variants, longer runs
worker     does one run: from a spec to a row and a trace
rows       ``runs.csv``, one row per run
traces     ``trace-<task>.csv``, the recipe during training: flips, decay ratio, second moments, AutoSwitch
runner     does many runs: processes, progress, resuming
cells      the rows of a table cell, and the learning rate chosen for it
stats      paired t intervals, Holm's correction, interpolation
contrasts  the four primary contrasts, fixed before their runs
rankings   the best method for each sparsity, and differences in words
tables     tables in Markdown; ``figures``: pictures; ``costs``: CPU-hours, and experiments too large to run
page       ``README.md`` from ``page.md``, and the check that the rows support it
========== ==========================================================================================================

To add a task, write ``tasks/<name>.py`` with a subclass of ``tasks.Task`` under ``@task("name")``; to add a method, one line in
``methods``. Their names appear nowhere else.
"""
