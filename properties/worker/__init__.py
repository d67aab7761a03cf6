"""What a worker does when it is asked, and how it is asked."""
