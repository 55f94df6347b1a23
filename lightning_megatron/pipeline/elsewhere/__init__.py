"""What stands for the parts that other stages own."""
