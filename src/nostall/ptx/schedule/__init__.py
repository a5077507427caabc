"""Search space over the instruction order and the assembler settings of a PTX kernel."""
