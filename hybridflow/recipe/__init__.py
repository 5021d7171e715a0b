"""What a run is: schema, graph, loading and every check. Imports no torch."""
