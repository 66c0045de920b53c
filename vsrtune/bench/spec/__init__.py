"""Wall: pure. Specifications of measurements: their values, reader and schema."""
