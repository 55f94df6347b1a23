"""The words of a tensor-parallel plan, and plans that models bring along."""
