"""The manifest of a run: schema, identity, rendering, plan, explanation and comparison."""
