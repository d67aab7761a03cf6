"""The journal of a run's answers, from which it resumes, and what these answers depend on."""
