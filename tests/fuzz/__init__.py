"""Fuzzing: damaged cubins must raise a documented error and cost little memory and time."""
