"""Which seeded bugs the laws kill: ``kernelproof score``."""
