"""Use the fixtures of tests/unit/config: a small valid tree, and the problems of changing it."""

from tests.unit.config.conftest import check_case, make_tree, no_cluster, problems

__all__ = ["check_case", "make_tree", "no_cluster", "problems"]
