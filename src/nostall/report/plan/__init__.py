"""Reports of pipeline plans: a summary as text and the schedule as a figure."""
