"""Which trtllm-gen kernel a FlashInfer release selects for a call, by its own code and lists."""
