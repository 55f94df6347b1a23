"""The user's step on pieces of a batch, one by one and at once: how its loss and its gradients come of theirs."""
