"""What validation and tests log over replicas."""
