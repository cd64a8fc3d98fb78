"""One recipe for each figure and table of the source documents.

`bilens reproduce NAME --scale small|paper` runs one. A recipe is a module whose docstring says
what it reproduces, and a function `run(workshop) -> Outcome`.
"""
