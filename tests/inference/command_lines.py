"""Command lines, as tests compare them."""


def flags(arguments: list[str]) -> dict[str, str | None]:
    """{"--flag": value or None}; a value never begins like a flag."""
    found = {}
    for i, word in enumerate(arguments):
        if word.startswith("--"):
            after = arguments[i + 1] if i + 1 < len(arguments) else "--"
            found[word] = None if after.startswith("--") else after
    return found
