"""The support table under test: questions, laws of decisions, and wrong gates to find."""
