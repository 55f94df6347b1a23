"""What a rank's memory is taken up by: counted, predicted, and what would help where it does not suffice."""
