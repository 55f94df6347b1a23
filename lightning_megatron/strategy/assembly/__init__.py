"""Turns the user's module into this rank's part: splits it, moves it to the device, and broadcasts shared state."""
