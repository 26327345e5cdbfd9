"""Training with a recipe: ``sparsify_``, the handle that it returns, and what happens in an optimizer's step."""
