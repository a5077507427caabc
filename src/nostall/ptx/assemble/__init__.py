"""Assembly of PTX with ptxas: installed versions, command lines, runs and a pool of processes."""
