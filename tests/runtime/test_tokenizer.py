"""Text must survive the way to ids and back, and bad input must be named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedTokenizerFast

from runtime.chat_format import ChatFormat
from runtime.errors import InvalidRequestError, ModelLoadError
from runtime.tokenizer import Tokenizer, load_end_token_ids, load_tokenizer

BOS, EOS, TOOL = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools[0].name }}{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def byte_tokenizer() -> TokenizersTokenizer:
    """One token per byte, BOS in front, and a tool token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = TokenizersTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.add_tokens([AddedToken("<tool>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return backend


Make = Callable[..., Path]


@pytest.fixture
def make_directory(tmp_path: Path) -> Make:
    """Save the byte tokenizer, changed by `change`, with these settings; its directory."""

    def make(
        change: Callable[[TokenizersTokenizer], None] = lambda _: None, **settings: Any
    ) -> Path:
        backend = byte_tokenizer()
        change(backend)
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE} | settings
        PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(tmp_path)
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 257}')
        return tmp_path

    return make


@pytest.fixture
def tokenizer(make_directory: Make) -> Tokenizer:
    return load_tokenizer(make_directory())


# Loading


def test_importing_the_module_imports_no_library() -> None:
    script = (
        "import sys, types, pathlib, importlib.util as u\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "package = types.ModuleType('runtime'); package.__path__ = [str(root)]\n"
        "sys.modules['runtime'] = package\n"
        "import runtime.tokenizer, runtime.model_source\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'gguf', 'numpy', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    root = Path(sys.modules["runtime.tokenizer"].__file__ or "").parent
    result = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_properties_are_those_of_the_saved_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.special_token_ids == frozenset({BOS, EOS})
    assert tokenizer.backend.token_to_id("<tool>") == TOOL


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelLoadError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}', "[1, 2"])
def test_a_damaged_tokenizer_is_named(make_directory: Make, content: str) -> None:
    path = make_directory()
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=f"the tokenizer in {path} can't be loaded"):
        load_tokenizer(path)


def test_a_tokenizer_that_runs_in_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "<unk>": 1}')
    (tmp_path / "config.json").write_text('{"model_type": "esm"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    (tmp_path / "merges.txt").write_text("#version\n")
    with pytest.raises(ModelLoadError, match=r"CTRLTokenizer, which runs in Python only"):
        load_tokenizer(tmp_path)


def test_code_in_the_directory_is_not_run(make_directory: Make) -> None:
    path = make_directory()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "evil.Evil"]}
    settings["tokenizer_class"] = "Evil"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text("{}")
    (path / "evil.py").write_text(f"open({str(path / 'run')!r}, 'w')")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load_tokenizer(path)
    assert not (path / "run").exists()


# Encoding and decoding


def test_encoding_puts_the_models_own_special_tokens_around(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi</s>")
    assert (ids[0], ids[-1], len(ids)) == (BOS, EOS, 4)
    assert tokenizer.encode("") == [BOS]


@pytest.mark.parametrize(
    "text",
    ["  lead", "\t\n\r\n", "a ,b . c 's", "👩‍🚀", "漢字", "e\u0301\u00e9", "x<tool>y", "\x00"],
)
def test_text_round_trips_exactly(make_directory: Make, text: str) -> None:
    tokenizer = load_tokenizer(make_directory(clean_up_tokenization_spaces=True))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_decoded_when_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, TOOL, EOS]) == "<tool>"
    assert tokenizer.decode([BOS, TOOL, EOS], skip_special_tokens=False) == "<s><tool></s>"


def test_a_batch_encodes_as_its_texts_alone(tokenizer: Tokenizer) -> None:
    texts = ["", "a", "漢字 " * 50, "x</s>y"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_stored_truncation_and_padding_are_switched_off(make_directory: Make) -> None:
    def cut_and_pad(backend: TokenizersTokenizer) -> None:
        backend.enable_truncation(4)
        backend.enable_padding(length=8)

    tokenizer = load_tokenizer(make_directory(cut_and_pad))
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "a" * 20])] == [2, 21]
    message = {"role": "user", "content": "a" * 20}
    assert len(tokenizer.apply_chat_template([message])) == len("user:" + "a" * 20 + "\n>")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ok", 5], "text 1 is a int, but must be a string"),
        (["ok", "ok", b"x"], "text 2 is a bytes"),
        (["ab\ud83d"], "text 0 has half a surrogate pair at character 2"),
    ],
)
def test_what_is_no_text_is_named(tokenizer: Tokenizer, texts: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.encode_batch(texts)


# Chats

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def chat_text(tokenizer: Tokenizer, messages: Any = CHAT, **options: Any) -> str:
    ids = tokenizer.apply_chat_template(messages, ChatFormat(**options))
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_chats_are_formatted_by_the_models_template(tokenizer: Tokenizer) -> None:
    assert chat_text(tokenizer) == "user:hi\nassistant:yes\n>", "no second BOS in front"
    assert chat_text(tokenizer, add_generation_prompt=False) == "user:hi\nassistant:yes\n"
    assert chat_text(tokenizer, tools=[{"name": "f"}]) == "user:hi\nassistant:yes\nf>"


def test_the_last_message_can_be_continued(tokenizer: Tokenizer) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat_text(tokenizer, **options) == "user:hi\nassistant:yes"
    with pytest.raises(InvalidRequestError, match="needs add_generation_prompt=False"):
        ChatFormat(continue_final_message=True)


def test_a_template_can_be_passed_in(make_directory: Make) -> None:
    path = make_directory(chat_template=None)
    for file in path.glob("chat_template*"):
        file.unlink()
    tokenizer = load_tokenizer(path)
    assert chat_text(tokenizer, chat_template="{{ messages[0].content }}") == "hi"
    with pytest.raises(InvalidRequestError, match=f"model {path} has no chat template; pass"):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "must be a list of at least one message, but is 'hello'"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([CHAT], "message 0 is a list, but must be a mapping"),
        ([*CHAT, "hi"], "message 2 is a str, but must be a mapping"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"role": 3, "content": "x"}], "message 0 has role 3"),
        ([{"role": "user", "content": None}], "message 0 has content of type NoneType"),
        ([{"role": "user", "content": 5}], "message 0 has content of type int"),
        (
            [{"role": "bad", "content": "x"}],
            "template .* can't format these messages: no such role",
        ),
    ],
)
def test_bad_messages_are_named(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template(messages)


def test_a_bad_template_is_an_invalid_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="can't format these messages"):
        tokenizer.apply_chat_template(CHAT, ChatFormat(chat_template="{% for %}"))


# End ids


def write_end_ids(path: Path, generation: Any, config: Any) -> None:
    for name, value in (("generation_config", generation), ("config", config)):
        content = {"model_type": "llama"} | ({} if value is ... else {"eos_token_id": value})
        (path / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("generation", "config", "named"),
    [
        ([7, 5], 9, (7, 5, 9)),
        (EOS, [EOS, 3], (EOS, 3)),
        (None, ..., ()),
        (..., 0, (0,)),
    ],
)
def test_end_ids_are_the_union_without_repeats(
    make_directory: Make, generation: Any, config: Any, named: tuple[int, ...]
) -> None:
    path = make_directory()
    write_end_ids(path, generation, config)
    assert load_end_token_ids(path) == named
    with_tokenizer = load_end_token_ids(path, load_tokenizer(path))
    assert with_tokenizer == (named if EOS in named else (*named, EOS))


def test_end_ids_need_no_generation_config_and_no_eos(make_directory: Make) -> None:
    path = make_directory(eos_token=None)
    (path / "config.json").write_text('{"model_type": "llama"}')
    assert load_end_token_ids(path) == ()


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, True, 1.0, {}])
def test_bad_end_ids_are_named(make_directory: Make, tokenizer: Tokenizer, value: Any) -> None:
    path = make_directory()
    write_end_ids(path, value, ...)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id must be"):
        load_end_token_ids(path, tokenizer)


def test_a_config_that_is_not_an_object_is_named(
    make_directory: Make, tokenizer: Tokenizer
) -> None:
    path = make_directory()
    for content in ("[1]", "{"):
        (path / "generation_config.json").write_text(content)
        with pytest.raises(ModelLoadError, match=r"generation_config\.json is not a JSON object"):
            load_end_token_ids(path, tokenizer)
