"""Training by sharding and hybrid plans: one rank's part."""
