"""Mining of issue distances from the machine code inside Python wheels and libraries."""
