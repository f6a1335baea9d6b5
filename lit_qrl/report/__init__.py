"""A run folder as a page to read: plots, samples, events, formats and configuration."""

from lit_qrl.report.comparison import render_comparison
from lit_qrl.report.run import Run, Series
from lit_qrl.report.single import render

__all__ = ["Run", "Series", "render", "render_comparison"]
