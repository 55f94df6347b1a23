"""Checkpoints: tensors under their logical names, in boxes, complete only when their marker is written."""
