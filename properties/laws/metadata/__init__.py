"""Laws of what builds the metadata of batches: integers, compared exactly."""
