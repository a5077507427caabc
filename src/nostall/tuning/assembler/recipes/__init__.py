"""Recipes of assembled cubins: made, recorded and replayed, and verified again."""
