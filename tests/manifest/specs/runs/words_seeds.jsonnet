local words = (import 'runs/words.jsonnet').words;
(import 'lib/named.libsonnet')({ ['words_seed_%d' % seed]: words { seed: seed } for seed in std.range(1, 2) })
