"""What FlashInfer publishes of its calls, and whether they answer so."""
