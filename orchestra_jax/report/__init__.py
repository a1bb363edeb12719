"""What a run shows: ``report.html``, the table of policies and the progress of training."""

from orchestra_jax.report.console import make_progress, policies_table
from orchestra_jax.report.page import write_report

__all__ = ["make_progress", "policies_table", "write_report"]
