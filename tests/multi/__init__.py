"""Tests that need several processes: functions of the device mesh, and whole Trainers."""
