// The demo, smaller, with separate prefill and decode engines, and with two engines that share a store. Runs with Mooncake need a machine without other networks (docs/inference.md).
local small = (import 'runs/reverse_text_smoke.jsonnet').reverse_text_smoke { layout+:: { trainer_ranks: 1 } };
// A question fills more than one block, because partial blocks are not moved.
local long = {
  problems:: [problem { args+: { instruction: 'write the letters of this word from last to first: ' } } for problem in super.problems],
};

(import 'lib/named.libsonnet')({
  reverse_text_prefill_decode: small {
    layout+:: { engines: 2, prefill_engines: 1 },
    // the orchestrator sends each request to both engines
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
