"""Sample on engines of other sites, which come and go, and refuse sites that lie."""
