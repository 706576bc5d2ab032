// Printable ASCII and the newline: all characters of the shipped tasks.
'\n' + std.join('', [std.char(code) for code in std.range(32, 126)])
