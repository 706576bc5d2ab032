// Qwen3 answers at once. It would otherwise reason in a block of its own, longer than a turn here.
{ model+: { tokenizer+: { chat_template_kwargs: { enable_thinking: false } } } }
