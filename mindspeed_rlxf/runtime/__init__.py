"""Runs role methods on worker processes: pools, role groups, references to rows, deadlines.

`ray_*.py` are the only files that import Ray.
"""
