"""Binary formats: ELF cubins, fatbins, 128-bit instruction words, and NVIDIA's disassembler."""
