"""What the same problems give with two releases: outcomes, speed, memory."""
