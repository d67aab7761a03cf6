"""Reports of a run: the screen, HTML, JSON, JUnit."""
