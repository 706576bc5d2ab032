// GLM-5 with sixteen trainer nodes instead of twelve: half the context parallelism, so half the exchanges.
(import 'lib/named.libsonnet')({
  glm5_run_32:
    (import 'runs/glm5_run.jsonnet').glm5_run {
      layout+:: { trainer_ranks: 128 },
      trainer+: { mesh+: { cp: 4 } },
    },
})
