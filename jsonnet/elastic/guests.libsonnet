// RL on engines of other sites too, which come and go with `orrery lend`.
{
  orchestrator+: {
    guests: {
      max_sites: 64,
      lease_s: 30,
      max_versions_behind: 1,
      verified_share: 0.1,
      tolerance: 4,
      // above the rounding of bfloat16 on one kind of hardware against another; float32 allows 1e-3
      min_logprob_difference: 0.05,
      block_bytes: 16777216,
    },
  },
}
