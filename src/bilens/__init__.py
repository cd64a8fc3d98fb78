"""bilens reads neural networks from their weights."""
