"""State that steps of several replicas carry to the next step, written from the samples of all of them."""
