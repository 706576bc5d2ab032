"""Write tokenizer folders, and read their chat templates and tool calls.

- The character tokenizer's format is `<|user|>abc<|end|><|assistant|>cba<|end|>`. A tool call is
  `<|call|>name input<|end_call|>`. A tool result is a `<|tool|>` turn.
- Pretrained models must use the Hermes / Qwen syntax for tool calls,
  `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import datetime
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.publish import sha256_of
from orrery.manifest.schema import Model
from orrery.tasks.task import ToolCall

PAD, END = "<|pad|>", "<|end|>"
CALL, END_CALL = "<|call|>", "<|end_call|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIALS = (PAD, END, *ROLES, CALL, END_CALL)  # token ids 0 to 7, before the alphabet
PAD_ID, END_ID = 0, 1

TODAY = datetime.datetime(2024, 7, 26)  # the date that chat templates print, Llama's default

CHARACTER_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '<|call|>' + call.function.name + ' ' -}}
{{- arguments.input if arguments.keys() | list == ['input'] \
and arguments.input is string else arguments | tojson -}}
{{- '<|end_call|>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
SMOLLM2 = "make weights/SmolLM2-135M-Instruct/config.json"
FETCH = f"Type `orrery fetch model NAME`, or for SmolLM2 `{SMOLLM2}`"
# variables that the renderer sets in a chat template
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
GIVEN |= {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now"}


def vocab_size(alphabet: str) -> int:
    """Return the number of tokens. jsonnet/lib/run.libsonnet repeats this formula."""
    return len(SPECIALS) + len(alphabet)


def write_tokenizer(model: Model, folder: Path) -> None:
    """Write `model.tokenizer` into `folder` as Hugging Face files.

    `chat_template_kwargs` become defaults in the template, so trainer, engines and exported models
    make equal prompts. Raise OrreryError if the template lacks such a variable, or if a pretrained
    tokenizer does not match its `sha256`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if model.tokenizer.kind == "characters":
        _write_character_tokenizer(model.tokenizer.alphabet, model, folder)
        return
    source = Path(model.tokenizer.path)
    if not (source / "tokenizer.json").is_file():
        raise OrreryError(
            f"model.tokenizer.path: there is no tokenizer.json in {str(source)!r}. {FETCH}, or "
            "name the model's folder"
        )
    files = [source / name for name in FILES if (source / name).is_file()]
    if (found := sha256_of(files)) != (expected := model.tokenizer.sha256):
        names = " ".join(file.name for file in files)
        raise OrreryError(
            f"model.tokenizer.sha256 {expected}: {names} of {source} have {found}. Write that if "
            "these files are right, or fetch the manifest's files again"
        )
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if variables := model.tokenizer.chat_template_kwargs:
        config = read_object(folder / "tokenizer_config.json", "fetch the model again")
        text = _with_defaults(template_source(config, folder), variables, source)
        (folder / "chat_template.jinja").write_text(text)


def _with_defaults(template: str, variables: Mapping[str, Any], source: Path) -> str:
    known = jinja2.meta.find_undeclared_variables(template_environment().parse(template))
    begin = ""
    for name, value in variables.items():
        if name not in known - GIVEN:
            has = ", ".join(sorted(known - GIVEN)) or "none"
            raise OrreryError(
                f"model.tokenizer.chat_template_kwargs: the chat template of {source} has no "
                f"variable {name!r} to set. Choose from {has}"
            )
        literal = "none" if value is None else json.dumps(value)
        begin += f"{{% if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif +%}}"
    return begin + template


def _write_character_tokenizer(alphabet: str, model: Model, folder: Path) -> None:
    if len(set(alphabet)) != len(alphabet):
        twice = "".join(sorted(c for c in set(alphabet) if alphabet.count(c) > 1))
        raise OrreryError(f"model.tokenizer.alphabet: it contains {twice!r} twice. Remove one")
    if model.vocab_size < vocab_size(alphabet):
        rule = f"{len(SPECIALS)} specials + {len(alphabet)} characters = {vocab_size(alphabet)}"
        raise OrreryError(
            f"model.vocab_size: {model.vocab_size} does not fit the tokenizer; {rule}"
        )
    vocab = {token: i for i, token in enumerate((*SPECIALS, *alphabet))}
    # Unknown characters become PAD, so `Renderer.encode` raises.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": PAD,
        "chat_template": CHARACTER_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": END_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def template_source(config: dict[str, Any], folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise OrreryError(
            f"tokenizer: {folder} has no chat template. Use an instruction-tuned model, or give "
            "it one (`orrery fetch model NAME --chat-template FILE`)"
        )
    return template


class _Generation(jinja2.ext.Extension):
    """Render the body of `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> jinja2.Environment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def take_calls(text: str, characters: bool) -> tuple[str, list[ToolCall]]:
    """Return (text without its calls, the calls). A malformed call stays in the text."""
    opens, closes = (CALL, END_CALL) if characters else ("<tool_call>", "</tool_call>")
    kept, calls, after = [], [], 0
    while (begin := text.find(opens, after)) >= 0:
        end = text.find(closes, begin + len(opens))
        if end < 0:
            break
        call = _parse_call(text[begin + len(opens) : end], characters)
        before, after = after, end + len(closes)
        kept.append(text[before : after if call is None else begin])
        calls += [] if call is None else [call]
    return "".join([*kept, text[after:]]), calls


def _parse_call(text: str, characters: bool) -> ToolCall | None:
    try:
        if characters:
            name, _, rest = text.partition(" ")
            arguments = json.loads(rest) if rest.startswith("{") else {"input": rest}
        else:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        msgspec.json.encode((name, arguments))  # raises for a lone surrogate
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_call = isinstance(name, str) and name and isinstance(arguments, dict)
    return ToolCall(name, arguments) if is_call else None
