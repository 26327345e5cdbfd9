"""How good are the models that each recipe leaves? The same small models trained with every recipe, pattern and seed.

``python -m bench.accuracy run`` does what is missing of the plan and ``... status`` says how far it is. One file, one idea:

========== ==========================================================================================================
tasks/     what is trained: model, batches and evaluation; one file per task
data       what the tasks download: ``python -m bench.accuracy fetch``
catalogs   what the task ``translation`` is trained on: texts in two languages, read, cleaned and split
methods    how it is trained: a name, and the recipe that it stands for
spec       one run, described in full: task, method, pattern, seed, learning rate, steps, optimizer, β₂
plan       which runs there are, in order: the search for learning rates, the tuned runs, controls, variants, longer runs
worker     one run: a spec goes in, a row and a trace come out
rows       ``runs.csv``, one row per run
traces     ``trace-<task>.csv``, what the recipe did on the way: flips, decay ratio, second moments, AutoSwitch
runner     many runs: processes, progress, resuming
cells      which rows stand behind a cell of a table, and the rate that was found for it
stats      paired t intervals, Holm's correction, interpolation
contrasts  the four primary contrasts, fixed before their runs
answers    which method at which sparsity, and differences in words
tables     tables in Markdown; ``figures``: pictures; ``costs``: CPU-hours, and what does not fit
page       ``README.md`` from ``page.md``, and the check that rows prove it
========== ==========================================================================================================

To add a task, write ``tasks/<name>.py`` with a subclass of ``tasks.Task`` under ``@task("name")``; to add a method, one line in
``methods``. Nothing else knows their names.
"""
