from __future__ import annotations

from chatlearn_testing.suites import RuntimeConformance


class TestLocalRuntime(RuntimeConformance):
    backend = "local"
