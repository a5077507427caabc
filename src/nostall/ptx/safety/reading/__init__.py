"""Reader of the validator: PTX text to blocks of instructions with registers and effects."""
