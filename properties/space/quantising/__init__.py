"""Drawing what quantisers are given."""
