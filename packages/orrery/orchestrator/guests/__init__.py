"""Sample on engines that other sites lend, and refuse sites that send false answers."""
