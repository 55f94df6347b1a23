"""Loading data so that a run can stop anywhere and go on with the next sample."""
