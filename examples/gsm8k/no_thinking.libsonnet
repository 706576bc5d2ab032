// Turn off Qwen3's thinking block, which would exceed `max_tokens_per_turn` of these runs.
{ model+: { tokenizer+: { chat_template_kwargs: { enable_thinking: false } } } }
