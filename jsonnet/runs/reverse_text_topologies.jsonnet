// The demo in small on engines that divide their work (prefill apart from decode), and on two that share a store. What has Mooncake in it runs where a machine has no network but the run's own (docs/inference.md).
local small = (import 'runs/reverse_text_smoke.jsonnet').reverse_text_smoke { layout+:: { trainer_ranks: 1 } };
// A question of more than one block of cache, for parts of a block stay where they are.
local long = {
  problems:: [problem { args+: { instruction: 'write the letters of this word from last to first: ' } } for problem in super.problems],
};

(import 'lib/named.libsonnet')({
  reverse_text_prefill_decode: small {
    layout+:: { engines: 2, prefill_engines: 1 },
    // the orchestrator itself takes each request to both engines
    inference+: { router: { kind: 'none' } },
  },
  reverse_text_prefill_decode_mooncake: self.reverse_text_prefill_decode {
    inference+: { kv_transfer: { kind: 'mooncake', protocol: 'tcp' } },
  },
  reverse_text_kv_store: small + long + {
    layout+:: { engines: 2 },
    inference+: { kv_offload: { kind: 'mooncake', protocol: 'tcp', segment_bytes: 67108864 } },
  },
})
