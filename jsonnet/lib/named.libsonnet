// Gives every run of a file the name of its key.
function(runs) std.mapWithKey(function(name, run) run { name: name }, runs)
