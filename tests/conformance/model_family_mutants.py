"""The template's model family with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

IS_FAMILY = "test_is_a_model_family"
NO_OPTION = "test_no_option_is_required"
TYPES = "test_every_declared_type_has_a_case"
TYPE = "test_the_type_is_that_of_the_configuration"
FACTS = "test_facts_are_those_of_the_cases"
STORED = "test_the_configuration_can_be_stored"
BEFORE = "test_facts_do_not_depend_on_what_was_read_before"
AGAIN = "test_a_changed_directory_is_read_again"
PROCESS = "test_another_process_reads_the_same"
BROKEN = "test_a_broken_configuration_is_refused"
MISSING = "test_a_missing_directory_is_refused"
NO_TOKENIZER = "test_a_missing_tokenizer_is_refused"
OTHER_TOKENIZER = "test_a_tokenizer_of_another_model_is_refused"
AS_IT_WAS = "test_the_process_stays_as_it_was"
HEAVY = "test_nothing_heavy_is_imported_before_a_run"
METHODS = "test_a_tokenizer_has_its_methods"
VOCABULARY = "test_every_token_is_in_the_vocabulary"
COMES_BACK = "test_text_comes_back"
POLICY = "test_a_renderer_has_the_policy_it_was_made_with"
PROMPT = "test_a_prompt_becomes_tokens_of_the_model"
INDEPENDENT = "test_prompts_are_independent"
READ_ONLY = "test_conversations_are_read_only"
EMPTY = "test_an_empty_prompt_is_an_error_with_a_reason"
CONVERSATION = "test_a_conversation_needs_a_template"
SYSTEM = "test_the_system_prompt_comes_before_conversations"
VERBATIM = "test_verbatim_text_stays_as_it_is"
DEMONSTRATION = "test_a_demonstration_continues_its_prompt"
ENDS = "test_a_demonstration_ends_as_a_completion_does"
CONTROLLED = "test_control_tokens_are_what_the_policy_says"
TOO_LONG = "test_a_text_that_is_too_long_is_refused_or_rendered"

MADE = "self.options = options"
READ = "file = Path(path) / name"
CONTENT = 'content = json.loads(file.read_text(encoding="utf-8"))'
MAX_LENGTH = 'max_length=_field(source.path, "max_length", int),'
VOCAB_SIZE = 'vocab_size=_field(source.path, "vocab_size", int),'
CONFIG = "config=_read(source.path, CONFIG_FILE, dict),"
RENDERED = "return ChatTemplateRenderer("
ARGUMENTS = "tokenizer, apply_chat_template, system_prompt, control_tokens=control_tokens, max_tokens=max_tokens"
REFUSED = "except (OSError, ValueError) as error:"
ENCODED = "return [self._ids[part] for part in parts]"
DECODED = 'return "".join(self._texts[token] for token in token_ids if token >= first)'
TURNS = """turns = "".join(f"<|{message['role']}|>{message['content']}{END}" for message in conversation)"""


def _family(name: str, caught_by: str, old: str, new: str, *also: tuple[str, str]) -> SourceMutant:
    return SourceMutant("model_family", name, "family.py", old, new, caught_by, also)


def _tokenizer(name: str, caught_by: str, old: str, new: str, *also: tuple[str, str]) -> SourceMutant:
    return SourceMutant("model_family", name, "tokenizer.py", old, new, caught_by, also)


def _renderer(name: str, caught_by: str, body: str) -> SourceMutant:
    """The renderer that is returned is another: ``body`` stands in a subclass of it."""
    indented = "".join(f"            {line}\n" for line in body.splitlines())
    made = f"class Other(ChatTemplateRenderer):\n            __slots__ = ()\n\n{indented}\n        return Other("
    return _family(name, caught_by, RENDERED, made)


MUTANTS = (
    _family("no_model_type", IS_FAMILY, "def model_type(", "def type_of("),
    _family("no_renderer", IS_FAMILY, "def renderer(", "def make_renderer("),
    SourceMutant(
        "model_family",
        "an_option_is_required",
        "options.py",
        'model_config = ConfigDict(extra="forbid", frozen=True)',
        'model_config = ConfigDict(extra="forbid", frozen=True)\n    revision: str',
        NO_OPTION,
    ),
    SourceMutant("model_family", "another_type_is_declared", "plugin.py", '{"acme"}', '{"acme", "acme_moe"}', TYPES),
    SourceMutant("model_family", "the_type_is_not_declared", "plugin.py", '{"acme"}', '{"acme_moe"}', TYPES),
    SourceMutant(
        "model_family",
        "options_import_torch",
        "options.py",
        "from pydantic import BaseModel, ConfigDict",
        "from pydantic import BaseModel, ConfigDict",
        HEAVY,
    ),
    _family("a_constant_type", TYPE, 'return str(_field(source.path, "model_type", str))', 'return "acme_1"'),
    _family(
        "facts_of_another_type", TYPE, 'model_type=_field(source.path, "model_type", str),', 'model_type="acme_base",'
    ),
    _family(
        "the_type_of_the_path",
        TYPE,
        'return str(_field(source.path, "model_type", str))',
        '_field(source.path, "model_type", str)\n        return Path(source.path).name',
    ),
    _family("the_wrong_length", FACTS, MAX_LENGTH, 'max_length=_field(source.path, "max_length", int) - 1,'),
    _family("the_length_is_a_text", FACTS, MAX_LENGTH, 'max_length=str(_field(source.path, "max_length", int)),'),
    _family("the_length_of_the_run", FACTS, MAX_LENGTH, "max_length=source.max_length or 4096,"),
    _family(
        "no_control_tokens", FACTS, VOCAB_SIZE, 'vocab_size=_field(source.path, "vocab_size", int) - len(CONTROL),'
    ),
    _family(
        "a_padded_vocabulary", FACTS, VOCAB_SIZE, 'vocab_size=-(-_field(source.path, "vocab_size", int) // 64) * 64,'
    ),
    _family("a_path_in_the_configuration", STORED, CONFIG, "config={'path': Path(source.path)},"),
    _family("the_configuration_is_a_text", STORED, CONFIG, "config=json.dumps(_read(source.path, CONFIG_FILE, dict)),"),
    _family("a_directory_has_a_snapshot", STORED, CONFIG, f"{CONFIG} snapshot=source.path,"),
    _family(
        "the_callers_configuration",
        BEFORE,
        READ,
        f"{READ}\n    if str(file) in KEPT:\n        return KEPT[KEPT.index(str(file)) + 1]",
        (
            "    return content\n",
            "    if name == CONFIG_FILE:\n        KEPT.extend((str(file), content))\n    return content\n",
        ),
    ),
    _family(
        "the_first_length_is_kept",
        AGAIN,
        READ,
        f"{READ}\n    if str(file) in KEPT:\n        return dict(KEPT[KEPT.index(str(file)) + 1])",
        (
            "    return content\n",
            "    if name == CONFIG_FILE:\n        KEPT.extend((str(file), dict(content)))\n    return content\n",
        ),
    ),
    _tokenizer(
        "a_set_of_characters",
        PROCESS,
        "self._texts = (*CONTROL, *characters)",
        "self._texts = (*CONTROL, *sorted(characters, key=hash))",
    ),
    _family("the_process_in_the_facts", PROCESS, CONFIG, 'config={"pid": os.getpid()},'),
    _family("a_raw_error_of_json", BROKEN, REFUSED, "except OSError as error:"),
    _family(
        "a_list_is_no_error",
        BROKEN,
        "if not isinstance(content, kind):",
        "if False:",
    ),
    _family(
        "the_error_names_no_file",
        BROKEN,
        'f"{file} cannot be read: {error}; export',
        'f"cannot be read: {error}; export',
    ),
    _family(
        "no_type_is_fine",
        BROKEN,
        "if not isinstance(value, kind) or not value:",
        'if name != "model_type" and (not isinstance(value, kind) or not value):',
    ),
    _family(
        "the_first_characters_are_enough",
        BROKEN,
        CONTENT,
        'content = json.loads(file.read_text(encoding="utf-8", errors="replace").strip("\\ufffd\\0") or "{}")',
        (
            'raise ModelError(f"{Path(path) / CONFIG_FILE} says {name}: {value!r}; it must be a {kind.__name__}")',
            "return 0",
        ),
    ),
    _family("a_raw_error_of_files", MISSING, REFUSED, "except ValueError as error:"),
    _family(
        "the_type_without_a_file",
        MISSING,
        'return str(_field(source.path, "model_type", str))',
        'return str(_field(source.path, "model_type", str)) if Path(source.path).exists() else "acme"',
    ),
    _family(
        "the_models_own_tokenizer",
        NO_TOKENIZER,
        "characters = _read(source.tokenizer_path, CHARACTERS_FILE, list)",
        "characters = _read(source.path, CHARACTERS_FILE, list)",
    ),
    _family(
        "no_tokenizer_is_ascii",
        NO_TOKENIZER,
        "characters = _read(source.tokenizer_path, CHARACTERS_FILE, list)",
        "exists = (Path(source.tokenizer_path) / CHARACTERS_FILE).exists()\n        "
        'characters = _read(source.tokenizer_path, CHARACTERS_FILE, list) if exists else list("abc")',
    ),
    _family("any_tokenizer_fits", OTHER_TOKENIZER, "if tokens > vocab_size:", "if False:"),
    _family("only_the_characters_are_compared", OTHER_TOKENIZER, "if tokens > vocab_size:", "if vocab_size < 1:"),
    _family("the_misfit_names_no_model", OTHER_TOKENIZER, "tokens, the model in {source.path} ", "tokens, the model "),
    _family(
        "a_raw_misfit",
        OTHER_TOKENIZER,
        'raise ModelError(\n                f"the tokenizer',
        'raise ValueError(\n                f"the tokenizer',
    ),
    _family("prints", AS_IT_WAS, READ, f"{READ}\n    print(file)"),
    _family("writes_a_cache", AS_IT_WAS, READ, f"{READ}\n    Path(tempfile.mkdtemp(), name).write_text(path)"),
    _family(
        "writes_into_the_model",
        AS_IT_WAS,
        READ,
        f'{READ}\n    (Path(path) / ".lock").touch() if Path(path).exists() else None',
    ),
    _family("seeds_everything", AS_IT_WAS, MADE, f"{MADE}\n        random.seed(0)"),
    _family("changes_the_environment", AS_IT_WAS, MADE, f"{MADE}\n        os.environ['ACME_FAMILY'] = '1'"),
    _tokenizer("no_end", METHODS, "eos_token_id = CONTROL.index(END)", "end_id = CONTROL.index(END)"),
    _tokenizer("no_vocabulary", METHODS, "def get_vocab(", "def vocabulary("),
    _tokenizer("the_end_is_outside", VOCABULARY, "eos_token_id = CONTROL.index(END)", "eos_token_id = 4096"),
    _tokenizer("the_end_is_missing", VOCABULARY, "eos_token_id = CONTROL.index(END)", "eos_token_id = -1"),
    _tokenizer(
        "control_tokens_are_outside",
        VOCABULARY,
        "return {token: ControlToken(text) for token, text in enumerate(CONTROL)}",
        "return {1000 + token: ControlToken(text) for token, text in enumerate(CONTROL)}",
    ),
    _tokenizer("shifted_by_one", COMES_BACK, DECODED, DECODED.replace("self._texts[token]", "self._texts[token - 1]")),
    _tokenizer("lower_case", COMES_BACK, DECODED, f"{DECODED}.upper()"),
    _tokenizer("spaces_between", COMES_BACK, 'return "".join(self._texts[token]', 'return " ".join(self._texts[token]'),
    _tokenizer("no_list_of_ids", COMES_BACK, ENCODED, "return np.array([self._ids[part] for part in parts])"),
    _tokenizer(
        "a_text_longer_each_time",
        COMES_BACK,
        ENCODED,
        "KEPT.append(text)\n        return [self._ids[part] for part in parts] + [0] * (KEPT.count(text) > 1)",
    ),
    _family("one_policy_for_all", POLICY, "control_tokens=control_tokens", 'control_tokens="text"'),
    _renderer("no_end_of_turn", POLICY, "@property\ndef end_of_turn_id(self):\n    return 9999"),
    _renderer(
        "ids_are_a_list",
        PROMPT,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    return replace(made, token_ids=made.token_ids.tolist())",
    ),
    _renderer(
        "ids_are_short",
        PROMPT,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    return replace(made, token_ids=made.token_ids.astype(np.int32))",
    ),
    _renderer(
        "another_text_than_ids",
        PROMPT,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    return replace(made, text=made.text.replace('abba', ''))",
    ),
    _renderer(
        "the_last_token_is_lost",
        PROMPT,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    return replace(made, token_ids=made.token_ids[:4])",
    ),
    _renderer(
        "prompts_are_remembered",
        INDEPENDENT,
        "def prompt(self, prompt, tools=()):\n"
        "    key = (repr(prompt), self.control_tokens, self.apply_chat_template)\n"
        "    known = [made for asked, made in KEPT if asked == key]\n"
        "    made = known[0] if known else ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    KEPT.append((key, made))\n"
        "    return made",
    ),
    _renderer(
        "the_prompt_before",
        INDEPENDENT,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    KEPT.append((id(self), made))\n"
        "    mine = [one for owner, one in KEPT if owner == id(self)]\n"
        "    return made if len(mine) < 3 else replace(made, token_ids=np.append(made.token_ids, 4))",
    ),
    _renderer(
        "messages_are_marked",
        READ_ONLY,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    if not isinstance(prompt, str):\n"
        "        prompt[0]['rendered'] = True\n"
        "    return made",
    ),
    _renderer(
        "the_system_prompt_is_put_into_the_conversation",
        READ_ONLY,
        "def prompt(self, prompt, tools=()):\n"
        "    if not isinstance(prompt, str) and prompt and self.system_prompt:\n"
        "        prompt.insert(0, {'role': 'system', 'content': self.system_prompt})\n"
        "    return ChatTemplateRenderer.prompt(self, prompt, tools)",
    ),
    _renderer(
        "an_empty_prompt_is_the_end",
        EMPTY,
        "def prompt(self, prompt, tools=()):\n    return ChatTemplateRenderer.prompt(self, prompt or 'a', tools)",
    ),
    _renderer(
        "a_raw_error_of_messages",
        EMPTY,
        "def prompt(self, prompt, tools=()):\n"
        "    isinstance(prompt, str) or prompt[0]['content']\n"
        "    return ChatTemplateRenderer.prompt(self, prompt, tools)",
    ),
    _renderer(
        "messages_are_lost",
        CONVERSATION,
        "def prompt(self, prompt, tools=()):\n"
        "    return replace(ChatTemplateRenderer.prompt(self, prompt, tools), messages=())",
    ),
    _renderer(
        "the_last_message_alone",
        CONVERSATION,
        "def prompt(self, prompt, tools=()):\n"
        "    last = prompt if isinstance(prompt, str) else prompt[-1:]\n"
        "    return ChatTemplateRenderer.prompt(self, last, tools)",
    ),
    _family("the_system_prompt_is_lost", SYSTEM, ARGUMENTS, ARGUMENTS.replace("system_prompt,", "None,")),
    _renderer(
        "the_system_prompt_always",
        SYSTEM,
        "def prompt(self, prompt, tools=()):\n"
        "    if not isinstance(prompt, str) and prompt and self.system_prompt:\n"
        "        own = [m for m in prompt if m.get('role') != 'system']\n"
        "        prompt = [{'role': 'system', 'content': self.system_prompt}, *own]\n"
        "    return ChatTemplateRenderer.prompt(self, prompt, tools)",
    ),
    _family("always_the_template", VERBATIM, ARGUMENTS, ARGUMENTS.replace("apply_chat_template,", "True,")),
    _renderer(
        "text_is_stripped_to_lower_case",
        VERBATIM,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    return made if self.uses_template else replace(made, text=made.text + ' ')",
    ),
    _renderer(
        "nothing_is_imitated",
        DEMONSTRATION,
        "def demonstration(self, prompt, completion, **named):\n"
        "    made = ChatTemplateRenderer.demonstration(self, prompt, completion, **named)\n"
        "    return replace(made, loss_mask=np.zeros_like(made.loss_mask))",
    ),
    _renderer(
        "the_mask_is_of_numbers",
        DEMONSTRATION,
        "def demonstration(self, prompt, completion, **named):\n"
        "    made = ChatTemplateRenderer.demonstration(self, prompt, completion, **named)\n"
        "    return replace(made, loss_mask=made.loss_mask.astype(np.float32))",
    ),
    _renderer(
        "the_demonstrations_prompt_is_plain",
        DEMONSTRATION,
        "def demonstration(self, prompt, completion, **named):\n"
        "    made = ChatTemplateRenderer.demonstration(self, prompt, completion, **named)\n"
        "    ids = made.prompt.token_ids[:-1]\n"
        "    return replace(made, prompt=replace(made.prompt, token_ids=ids))",
    ),
    _renderer(
        "nothing_to_imitate_is_fine",
        DEMONSTRATION,
        "def demonstration(self, prompt, completion, **named):\n"
        "    return ChatTemplateRenderer.demonstration(self, prompt, completion or 'a', **named)",
    ),
    _renderer(
        "the_end_is_not_imitated",
        ENDS,
        "def demonstration(self, prompt, completion, **named):\n"
        "    made = ChatTemplateRenderer.demonstration(self, prompt, completion, **named)\n"
        "    kept = made.loss_mask.copy()\n"
        "    kept[np.flatnonzero(kept)[-1]] = False\n"
        "    return replace(made, loss_mask=kept)",
    ),
    _tokenizer(
        "spelled_tokens_stay_tokens",
        CONTROLLED,
        "list(text) if split_special_tokens else self._parts(text)",
        "self._parts(text)",
    ),
    _tokenizer(
        "control_tokens_are_ordinary",
        CONTROLLED,
        "special: bool = True",
        "special: bool = True",
        (
            "for piece in pieces for part in ([piece] if piece in CONTROL else piece)]",
            "for piece in pieces for part in piece]",
        ),
    ),
    _renderer(
        "control_tokens_are_found_twice",
        CONTROLLED,
        "def spelled_control_tokens(self, *texts):\n"
        "    return 2 * ChatTemplateRenderer.spelled_control_tokens(self, *texts)",
    ),
    _renderer(
        "no_control_token_is_found",
        CONTROLLED,
        "def spelled_control_tokens(self, *texts):\n    return ()",
    ),
    _renderer(
        "a_text_that_fits_is_too_long",
        TOO_LONG,
        "def prompt(self, prompt, tools=()):\n"
        "    made = ChatTemplateRenderer.prompt(self, prompt, tools)\n"
        "    if self.max_tokens is not None and len(made.token_ids) >= self.max_tokens:\n"
        "        raise DataError('too long')\n"
        "    return made",
    ),
    _renderer(
        "a_long_text_is_cut",
        TOO_LONG,
        "def prompt(self, prompt, tools=()):\n"
        "    cut = prompt[:self.max_tokens] if isinstance(prompt, str) else prompt\n"
        "    return ChatTemplateRenderer.prompt(self, cut, tools)",
    ),
)
