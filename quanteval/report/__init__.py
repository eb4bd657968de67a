"""Records to what people read: tables, verdicts, JUnit and summaries. Pure, and the only place that formats."""

from quanteval.report.comparison import comparison_text, sample_text
from quanteval.report.details import details_markdown, details_text
from quanteval.report.drift import drift_csv, drift_json, drift_markdown, drift_summary, drift_text
from quanteval.report.junit import junit_xml
from quanteval.report.load import load_csv, load_files, load_json, load_markdown, load_text
from quanteval.report.openmetrics import openmetrics_text
from quanteval.report.render import render_csv, render_json, render_markdown, render_terminal
from quanteval.report.table import Cell, Column, Row, Table, build_table
from quanteval.report.trend import slopes_csv, trend_csv, trend_json, trend_text
from quanteval.report.verdicts import summary_markdown, verdict_text

__all__ = [
    "Cell",
    "Column",
    "Row",
    "Table",
    "build_table",
    "comparison_text",
    "details_markdown",
    "details_text",
    "drift_csv",
    "drift_json",
    "drift_markdown",
    "drift_summary",
    "drift_text",
    "junit_xml",
    "load_csv",
    "load_files",
    "load_json",
    "load_markdown",
    "load_text",
    "openmetrics_text",
    "render_csv",
    "render_json",
    "render_markdown",
    "render_terminal",
    "sample_text",
    "slopes_csv",
    "summary_markdown",
    "trend_csv",
    "trend_json",
    "trend_text",
    "verdict_text",
]
