"""Which layouts fit, which is fastest, and why."""
