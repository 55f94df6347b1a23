"""Reads and writes checkpoint directories, and converts Lightning files and safetensors."""
