// The demo in small on engines that divide their work (prefill apart from decode), and on one whose cache goes on in host memory and disk.
local small = (import 'runs/reverse_text_smoke.jsonnet').reverse_text_smoke { layout+:: { trainer_ranks: 1 } };

(import 'lib/named.libsonnet')({
  reverse_text_prefill_decode: small {
    layout+:: { engines: 2, prefill_engines: 1 },
    // the orchestrator itself takes each request to both engines
    inference+: { router: { kind: 'none' } },
  },
  reverse_text_kv_tiers: small {
    layout+:: { engines: 1 },
    inference+: { kv_offload: { kind: 'tiers', host_bytes: 67108864, disk: true } },
  },
})
