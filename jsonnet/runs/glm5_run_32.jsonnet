// GLM-5 with sixteen trainer nodes instead of twelve and twice the rollouts in flight: faster steps, on older samples.
(import 'lib/named.libsonnet')({
  glm5_run_32:
    (import 'runs/glm5_run.jsonnet').glm5_run {
      layout+:: { trainer_ranks: 128 },
      trainer+: { mesh+: { cp: 4 } },
      // the longest rollout starts 30 versions before its batch
      orchestrator+: { admission+: { max_in_flight: 2048 }, max_off_policy_steps: 32 },
    },
})
