"""Tests of nostall."""
