"""Whole models in tiny random configurations, trained, evaluated and run without gradients, against eager autocast."""
