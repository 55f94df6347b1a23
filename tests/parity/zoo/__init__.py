"""Ordinary LightningModules, written as their users would write them: nothing here knows the strategy.

They differ where a pipeline could trip: how layers are listed and called, what is passed besides the hidden state, who
holds parameters, what is tied, what a batch looks like, how the loss is returned. Dropout is 0 throughout.
"""
