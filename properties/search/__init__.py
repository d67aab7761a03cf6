"""The search for counterexamples: drawing, judging, confirming, shrinking."""
