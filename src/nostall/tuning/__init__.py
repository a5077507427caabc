"""The main job as one readable story: program, space, search, verify, measure, store."""
