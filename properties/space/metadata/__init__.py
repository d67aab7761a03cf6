"""Drawing problems of what builds the metadata of batches."""
