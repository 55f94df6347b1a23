"""The kinds of experts that modules have, each led through the exchange of tokens, and tried before."""
