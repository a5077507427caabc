"""The search for a batch's fastest plan, and the stored winners that plans are taken from."""
