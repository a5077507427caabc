"""The record of a training job, and readers for tables of such records."""
