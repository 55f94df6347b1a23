"""The arguments of ``MegatronStrategy``, and the checks that refuse invalid values and combinations."""
