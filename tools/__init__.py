"""Tools of this repository that are not installed with the package: calibration of the planner."""
