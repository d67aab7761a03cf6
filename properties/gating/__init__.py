"""The support table under test: questions, laws of decisions, and wrong decisions to find."""
