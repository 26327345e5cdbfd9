"""The command line, ``python -m nmkernels VERB``: ``main.py`` has the table of verbs, one file per verb.

A verb's module defines ``add_arguments(parser)`` and ``run(args) -> exit status``; whatever is slow to
import is imported inside ``run``, so that ``--help`` answers at once.
"""
