"""The engines of a stage, seen from the orchestrator."""
