"""Checks of the verifier: false alarms, in-order rules, seeded hazards, walks."""
