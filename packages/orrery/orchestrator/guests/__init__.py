"""Sample on engines of other sites, and refuse sites that send false answers."""
