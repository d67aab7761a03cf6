"""What all commands share: errors, outputs, the selection of implementations and laws."""
