"""Searches that a recipe may need before or during a run: a decay factor, an order of the input channels."""
