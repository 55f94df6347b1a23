"""Schedules as data: one file per family, their instructions, the checker and the simulator."""
