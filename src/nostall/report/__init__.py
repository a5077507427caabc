"""Reports: HTML pages and figures of runs, plans and workloads, each a single file."""
