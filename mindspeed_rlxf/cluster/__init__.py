"""Run role methods on worker processes: pools, role groups, references to rows, deadlines.

Two implementations of `protocol.Runtime`: `ray` and `local`.
"""
