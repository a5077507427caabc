"""PTX programs: parse, re-order and validate them, and assemble the result."""
