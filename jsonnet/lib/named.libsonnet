// Sets the name of every run of a file to its key.
function(runs) std.mapWithKey(function(name, run) run { name: name }, runs)
