"""Native schedules of the attention kernels: record a step's kernels, search, check and store."""
