"""How routers and experts that models have are drawn, from the table of real values."""
