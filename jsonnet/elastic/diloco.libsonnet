// DiLoCo over two to eight sites that come and go, with the published values of DiLoCo and INTELLECT-1.
{
  trainer+: {
    elastic: {
      min_sites: 2,
      max_sites: 8,
      inner_steps: 100,
      fragments: 1,
      delay_steps: 0,
      delay_merge: 0,
      outer: { lr: 0.7, momentum: 0.9, nesterov: true },
      codec: 'int8_block',
      error_feedback: false,
      topology: 'ring',
      weights: 'tokens',
      admission: 'open',
      quorum: 1,
      voters: 5,
      grace_s: 60,
      heartbeat_s: 2,
      dead_after_s: 10,
      store_timeout_s: 300,
      exchange_timeout_s: 600,
      snapshots: { keep: 2, block_bytes: 16777216 },
    },
  },
}
