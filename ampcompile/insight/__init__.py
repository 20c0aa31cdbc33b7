"""Insight into a call: `explain`, `audit`, `record`, `compare`, `watch`. They share records, tables and pages."""
