"""One class per role; each method is a few lines into an engine."""
