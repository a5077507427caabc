"""Hazard validation: results and sources in flight, the reuse cache and the order of memory."""
