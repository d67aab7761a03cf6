"""Problems: frozen, JSON-serialisable descriptions of one call."""
