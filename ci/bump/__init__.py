"""The gate before a bump: two FlashInfer releases, or two environments, and one verdict."""
