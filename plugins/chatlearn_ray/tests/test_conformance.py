from __future__ import annotations

import pytest

from chatlearn_testing.suites import RuntimeConformance

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]


class TestRayRuntime(RuntimeConformance):
    backend = "ray"
