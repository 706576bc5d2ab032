// GLM-5 with sixteen nodes that train instead of twelve: half of the context parallelism, so half of the exchange.
(import 'lib/named.libsonnet')({
  glm5_run_32:
    (import 'runs/glm5_run.jsonnet').glm5_run {
      layout+:: { trainer_ranks: 128 },
      trainer+: { mesh+: { cp: 4 } },
    },
})
