"""Megatron-style 3D parallelism for ordinary LightningModules."""
