"""The two releases under comparison, and what is asked of them."""
