// The demo with three seeds: weights, training problems and their order differ, held-out problems do not.
local reverse_text = (import 'runs/reverse_text.jsonnet').reverse_text;
(import 'lib/named.libsonnet')({ ['reverse_text_seed_%d' % seed]: reverse_text { seed: seed } for seed in std.range(1, 3) })
