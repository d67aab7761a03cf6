"""What the libraries in a wheel hold for each chip, by their device code."""
