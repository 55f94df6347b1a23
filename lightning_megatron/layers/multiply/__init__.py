"""The matrix products of split linears, in the weights' dtype or in 8 bits, and the weights that they multiply by."""
