"""Legal changes of PTX, the input of NVIDIA's assembler ptxas."""
