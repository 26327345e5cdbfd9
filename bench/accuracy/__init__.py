"""How good are the models that each recipe leaves? The same small models trained with every recipe, pattern and seed.

``python -m bench.accuracy run`` trains the missing runs of the plan, and ``... status`` shows its progress; ``... prune`` prunes
pretrained models in one shot. The files:

=========== =========================================================================================================
tasks/      what is trained: model, batches and evaluation; one file per task
data        what the tasks download: ``python -m bench.accuracy fetch``
catalogs    the data of the task ``translation``: texts in two languages, read, cleaned and split
methods     how it is trained: names of methods, and their recipes; ``dense_v``: the optimizer of the oracle
spec        a case (task, method, pattern, optimizer, β₂, steps), and a run, which is a case with a learning rate and a seed
studies     which cases are compared, in order
plan        the search for a case's learning rate, and the runs that it still needs
worker      does one run: from a spec to a row; ``place``: on the CPU, a GPU or several
runner      does many runs: processes, progress, resuming
rows        ``runs.csv``, one row per run
stats       intervals, equivalence tests, Holm's correction
contrasts   the contrasts on STEP's claim, fixed before their runs
tables      the tables of the pages; ``leaderboard``: those of a recipe of yours
page        the pages from the templates in ``pages``, and the check that the rows support them
oneshot     one-shot pruning of the models of ``tasks.pretrained``: plan, cells and ``oneshot.csv``; ``oneshot_page``: its tables
layers      what one-shot pruning of one layer costs; ``rounding``: integers as values, with and without 2:4
=========== =========================================================================================================

To add a task, write ``tasks/<name>.py`` with a subclass of ``tasks.Task`` under ``@task("name")``; to add a method, one line in
``methods``. Their names appear nowhere else.
"""
