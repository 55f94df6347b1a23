"""Lightning's hooks, as a user meets them."""
