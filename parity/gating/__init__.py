"""Comparing a report with a policy and a baseline, for continuous integration."""
