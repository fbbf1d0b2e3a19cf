"""These tests belong to the packages that are written from here; ``tests/plugins/test_scaffold.py`` runs them there."""

collect_ignore_glob = ["*"]
