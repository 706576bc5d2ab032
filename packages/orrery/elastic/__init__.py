"""Train one model at several sites: membership, outer loop, codecs, exchange, recovery."""
