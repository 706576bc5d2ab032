"""What a run is: its schema, its identity, how it is rendered from Jsonnet, planned, explained and compared."""
