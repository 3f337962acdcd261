"""Prompts and conversations to token ids (field cases 7 and 23, the pure part)."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import processors

from enginemesh.v1.inference_pb2 import ChatMessage
from gateway.tokenizer import ModelTokenizer
from mesh.errors import IntegrityError, InvalidFieldError, UnsupportedError
from mesh.manifest import TokenizerInfo
from tests.gateway.helpers import byte_fallback_tokenizer, byte_level_tokenizer
from tests.gateway.tokenizers_of_all_kinds import trained_byte_level_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
)
HELLO = [ChatMessage(role="user", content="beta 삼겹살")]


def model(tokenizer, **info):
    return ModelTokenizer(tokenizer.to_str().encode(), TokenizerInfo(vocab_size=400, **info))


def with_start_token():
    """A tokenizer whose post-processor puts `<|im_start|>` before every text."""
    tokenizer = trained_byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
    )
    return tokenizer


def test_a_prompt_gets_the_special_tokens_of_the_post_processor():
    tokenizer = with_start_token()
    start = tokenizer.token_to_id("<|im_start|>")
    ids = model(tokenizer).encode_prompt("beta")
    assert ids == [start, *tokenizer.encode("beta", add_special_tokens=False).ids]


def test_a_conversation_has_only_the_special_tokens_that_its_template_names():
    tokenizer = with_start_token()
    ids = model(tokenizer, chat_template=TEMPLATE).encode_chat(HELLO)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nbeta 삼겹살<|im_end|>"
    assert ids.count(tokenizer.token_to_id("<|im_start|>")) == 1


def test_a_template_may_name_the_start_token():
    tokenizer = with_start_token()
    ids = model(tokenizer, chat_template=TEMPLATE, bos_token="<|im_end|>").encode_chat(HELLO)
    assert ids[:2] == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|im_start|>")]


def test_truncation_and_padding_that_the_file_asks_for_are_not_done():
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert model(tokenizer).encode_prompt("abcdefgh") == list(b"abcdefgh")


@pytest.mark.parametrize(
    "text", ['\\"', "\0", "\u200b", "\ufffd", "\ufeff", "삼겹살 " * 90_000, "x" * 1_000_000]
)
@pytest.mark.parametrize("make", [byte_level_tokenizer, trained_byte_level_tokenizer])
def test_odd_text_is_encoded_whole(make, text):
    tokenizer = make()
    ids = model(tokenizer).encode_prompt(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_a_lone_surrogate_is_an_error_of_its_field(text):
    tokenizer = model(byte_level_tokenizer(), chat_template="{{ '\ud800' }}" + TEMPLATE)
    with pytest.raises(InvalidFieldError) as caught:
        tokenizer.encode_prompt(text)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidFieldError) as caught:
        tokenizer.encode_chat(HELLO)
    assert caught.value.field == "chat"
    assert tokenizer.encode_prompt("plain") == list(b"plain")


def test_text_that_gives_no_tokens_is_refused():
    with pytest.raises(InvalidFieldError, match="no tokens"):
        model(byte_level_tokenizer(), chat_template="{# nothing #}").encode_chat(HELLO)


def test_a_model_without_a_template_takes_no_conversation():
    with pytest.raises(UnsupportedError):
        model(byte_level_tokenizer()).encode_chat(HELLO)


def test_a_broken_template_harms_no_prompt():
    tokenizer = model(byte_level_tokenizer(), chat_template="{% for %}")
    assert tokenizer.encode_prompt("a") == [97]
    with pytest.raises(InvalidFieldError):
        tokenizer.encode_chat(HELLO)


def test_ids_of_another_vocabulary_are_named_by_their_place():
    tokenizer = model(byte_level_tokenizer())
    assert tokenizer.check_ids([0, 399]) == [0, 399]
    with pytest.raises(InvalidFieldError) as caught:
        tokenizer.check_ids([1, 400, 2])
    assert caught.value.field == "token_ids.ids[1]"


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[1]", b'{"model": {"type": "Nonsense"}}'])
def test_a_file_that_is_no_tokenizer_is_named(data):
    with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
        ModelTokenizer(data, TokenizerInfo(vocab_size=1))


def test_threads_may_encode_at_once():
    tokenizer = model(trained_byte_level_tokenizer(), chat_template=TEMPLATE)
    texts = [f"beta {number} 😀" * 50 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(tokenizer.encode_prompt, texts))
        chats = list(
            pool.map(lambda text: tokenizer.encode_chat([ChatMessage(role="user", content=text)]), texts)
        )
    assert at_once == [tokenizer.encode_prompt(text) for text in texts]
    assert chats == [tokenizer.encode_chat([ChatMessage(role="user", content=text)]) for text in texts]


def test_an_answer_goes_on_from_the_text_before_it():
    tokenizer = byte_fallback_tokenizer()
    hello, world = (tokenizer.token_to_id(word) for word in ("▁Hello", "▁world"))
    made = model(tokenizer)
    assert made.output([], [1, hello]).push([world]) == (" world", None)
    assert made.output([]).push([world]) == ("world", None)
