"""Weights of models: formats, layouts, conversion, and reading that runs no code."""
