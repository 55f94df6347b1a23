"""Commands of the `lightning-megatron` program, one module each."""
