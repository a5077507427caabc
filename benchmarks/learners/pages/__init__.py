"""Sections of the page of the learners."""
