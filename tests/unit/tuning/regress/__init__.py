"""Tests of the comparison of two compilers."""
