"""Which part of which logical tensor this rank holds."""
