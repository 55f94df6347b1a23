"""State that steps and hooks carry on: written from the samples of all replicas, or kept by name on all stages."""
