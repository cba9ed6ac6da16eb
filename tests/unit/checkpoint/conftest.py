"""Use the fixtures of tests/unit/config that make a configuration."""

from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]
