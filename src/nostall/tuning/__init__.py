"""Tuning of one GPU kernel: load it, search schedules, verify, measure, record and store."""
