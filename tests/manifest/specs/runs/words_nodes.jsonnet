// Five nodes of two devices: one prefills, two decode, two train.
(import 'lib/named.libsonnet')({
  words_nodes:
    (import 'runs/words.jsonnet').words {
      layout+:: { trainer_ranks: 4, engines: 6, prefill_engines: 2 },
      hardware+: { num_nodes: 5 },
    },
})
