"""One table per architecture. Imports no torch."""
