"""Use the fixtures of tests/unit/config that make a configuration and return its problems."""

from tests.unit.config.conftest import check_case, make_tree, no_cluster, problems

__all__ = ["check_case", "make_tree", "no_cluster", "problems"]
