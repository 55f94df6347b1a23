"""Stand-ins for the parts of the module that other stages own."""
