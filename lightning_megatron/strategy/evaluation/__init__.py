"""What validation and tests log over replicas, and keep for the hooks behind them."""
