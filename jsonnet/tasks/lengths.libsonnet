// Answers of random lengths with a long tail, to measure speed with untrained weights. The longest of a thousand is twenty medians long.
{
  local answers = self.answer_tokens,
  answer_tokens:: { median: 32, max: 512 },
  problems:: [
    {
      name: 'lengths',
      kind: 'lengths',
      args: { median_tokens: answers.median, sigma: 1.0, max_tokens: answers.max, prompt_words: 10 },
      weight: 1,
      max_turns: 1,
    },
  ],
  // ten words of four characters, each with a blank, and the start of the turns
  context_tokens:: answers.max + 64,
  orchestrator+: { sampling+: { max_tokens_per_turn: answers.max }, rollout_timeout_s: 900 },
}
