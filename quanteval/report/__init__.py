"""Records to what people read: tables, verdicts, JUnit and summaries. Pure, and the only place that formats."""

from quanteval.report.comparison import comparison_text, sample_text
from quanteval.report.details import details_markdown
from quanteval.report.junit import junit_xml
from quanteval.report.render import render_csv, render_json, render_markdown, render_terminal
from quanteval.report.table import Cell, Column, Row, Table, build_table
from quanteval.report.verdicts import summary_markdown, verdict_text

__all__ = [
    "Cell",
    "Column",
    "Row",
    "Table",
    "build_table",
    "comparison_text",
    "details_markdown",
    "junit_xml",
    "render_csv",
    "render_json",
    "render_markdown",
    "render_terminal",
    "sample_text",
    "summary_markdown",
    "verdict_text",
]
