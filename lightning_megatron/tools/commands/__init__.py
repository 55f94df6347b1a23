"""The ``lightning-megatron`` command line: one file per command."""
