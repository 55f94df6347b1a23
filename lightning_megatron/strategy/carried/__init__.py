"""What steps of several replicas go on from, written from the samples of all of them."""
