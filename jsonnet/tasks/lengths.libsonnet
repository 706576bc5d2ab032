// Answers of drawn lengths with a long tail, for measuring with weights that nobody has trained: in a thousand, the longest has twenty medians.
function(median_tokens, max_tokens) {
  problems:: [
    {
      name: 'lengths',
      kind: 'lengths',
      args: { median_tokens: median_tokens, sigma: 1.0, max_tokens: max_tokens, prompt_words: 10 },
      weight: 1,
      max_turns: 1,
    },
  ],
  // ten words of four characters, each with a blank, and what opens the turns
  context_tokens:: max_tokens + 64,
  orchestrator+: { sampling+: { max_tokens_per_turn: max_tokens }, rollout_timeout_s: 900 },
}
