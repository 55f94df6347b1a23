"""Values that validation and tests log over replicas, and keep for the hooks after them."""
