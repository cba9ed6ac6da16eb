"""Collected by `make test-hosts` only: these tests need root and a minute or two."""

import os

collect_ignore_glob = [] if os.environ.get("RLXF_TEST_HOSTS") else ["test_*.py"]
