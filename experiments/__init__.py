"""One recipe for each figure and table of the source documents.

`bilens reproduce NAME --scale small|paper` runs one. A recipe is a file here with a function
`run(context: RecipeContext) -> Outcome`. Its docstring describes it, in the first line as the title
of its page.
"""
