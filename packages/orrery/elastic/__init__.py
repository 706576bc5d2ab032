"""Train one model at several sites with DiLoCo."""
