"""Call, update and recover the engines of a stage."""
