"""``chatlearn report``: one self-contained HTML file about a run.

``run_files`` reads the run directory; ``curves``, ``step_time``, ``timeline``, ``rollouts`` and ``overview`` convert
it for display; ``page`` inserts the result into the files of ``assets/``.
"""

from __future__ import annotations

from chatlearn_observe.report.write import DEFAULT_MAX_ROLLOUTS, ReportSettings, WrittenReport, write_report

__all__ = ["DEFAULT_MAX_ROLLOUTS", "ReportSettings", "WrittenReport", "write_report"]
