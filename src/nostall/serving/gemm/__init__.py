"""SmoothGEMM: linear layers for every number of rows M, chosen from a finite measured table."""
