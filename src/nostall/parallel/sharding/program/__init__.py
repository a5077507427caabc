"""Execution of a sharding plan: local operators on each device and collectives between them."""
