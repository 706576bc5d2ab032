// GLM-5 on 32 nodes: a second engine of eight nodes decodes, and two engines prefill instead of four.
(import 'lib/named.libsonnet')({
  glm5_run_32:
    (import 'runs/glm5_run.jsonnet').glm5_run {
      layout+:: { engines: 4, prefill_engines: 2 },
      hardware+: { num_nodes: 32 },
      // the longest rollout starts 39 versions before its batch
      orchestrator+: { admission+: { max_in_flight: 2560 }, max_off_policy_steps: 40 },
    },
})
