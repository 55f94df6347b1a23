"""The arguments of ``MegatronStrategy``, and what refuses values that cannot be meant or do not go together."""
