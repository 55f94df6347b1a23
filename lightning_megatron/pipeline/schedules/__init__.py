"""One file per family of schedules; :mod:`lightning_megatron.pipeline.schedule` is the door."""
