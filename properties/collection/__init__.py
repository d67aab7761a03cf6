"""What the pytest plugin collects and how its processes share the work."""
