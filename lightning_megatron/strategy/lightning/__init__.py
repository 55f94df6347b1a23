"""The one place that touches private names of Lightning."""
