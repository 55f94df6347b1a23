"""What wraps a layer's ``forward``: recomputation, compilation, split backwards."""
