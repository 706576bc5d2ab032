"""Call, update and recover a stage's engines."""
