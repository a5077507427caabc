"""Lossless tokens and statements of a PTX file."""
