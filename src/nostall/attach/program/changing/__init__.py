"""Kinds of changes that need more than a setting: optimiser steps, losses, generation."""
