"""Each kind of tokenizer, built here in a moment: text, ids, bytes of tokens and dialogues."""

import base64
import json
import socket
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.rl.pieces import byte_level_bytes, piece_texts
from megatron.rl.text import TextTokenizer, TokenizerConfig, build_tokenizer
from slime_loss.checked_config import ConfigError

LINES = ["one plus two is three", "what is four plus five", "the sum of six and seven"] * 20
HARD = "one  plus 😀 wörld, 三\n"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "one plus two"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def template(folder: Path) -> str:
    path = folder / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def sentence_piece(folder: Path, template: str) -> TextTokenizer:
    path = folder / "small.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=file,
            vocab_size=320,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            control_symbols=["[INST]", "[INST]x"],
            minloglevel=2,
        )
    return build_tokenizer(
        TokenizerConfig("SentencePieceTokenizer", str(path), chat_template=template)
    )


def save_hugging_face(path: Path, *, chat_template: str | None) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings |= {"chat_template": chat_template} if chat_template else {}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="module")
def hugging_face(folder: Path) -> TextTokenizer:
    path = folder / "hf"
    save_hugging_face(path, chat_template=CHATML)
    generation = {"eos_token_id": [2, 0]}
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(path)))


@pytest.fixture(scope="module")
def tiktoken_file(folder: Path) -> str:
    tokens = [bytes([i]) for i in range(256)] + [b"on", b"one", b" p", b"\xf0\x9f"]
    rows = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": ""}
        for i, t in enumerate(tokens)
    ]
    path = folder / "vocabulary.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tik_token(tiktoken_file: str, template: str) -> TextTokenizer:
    return build_tokenizer(
        TokenizerConfig(
            "TikTokenizer",
            tiktoken_file,
            vocab_size=270,
            tiktoken_num_special_tokens=10,
            chat_template=template,
        )
    )


@pytest.fixture(params=["sentence_piece", "hugging_face", "tik_token"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return request.getfixturevalue(request.param)


class TestEveryTokenizer:
    def test_gives_the_text_back(self, tokenizer: TextTokenizer) -> None:
        ids = tokenizer.encode(HARD)
        assert ids.dtype == np.int64
        assert tokenizer.decode(ids) == HARD
        assert b"".join(tokenizer.token_bytes(ids)).decode().removeprefix(" ") == HARD

    def test_a_character_of_many_tokens_is_shown_once(self, tokenizer: TextTokenizer) -> None:
        pieces = tokenizer.token_bytes(tokenizer.encode("😀"))
        assert len(pieces) > 1
        texts = piece_texts(pieces)
        assert texts[-1] == "😀"
        assert "".join(texts).strip() == "😀"

    def test_a_response_that_ends_inside_of_a_character(self, tokenizer: TextTokenizer) -> None:
        ids = tokenizer.encode("one 😀")[:-1]
        assert tokenizer.decode(ids).startswith("one ")
        whole = b"".join(tokenizer.token_bytes(ids))
        assert "one 😀".encode().startswith(whole.removeprefix(b" "))
        assert len(whole) > len(b" one ")

    def test_ids_of_a_padded_vocabulary(self, tokenizer: TextTokenizer) -> None:
        ids = [*tokenizer.encode("one"), tokenizer.vocab_size, -1]
        assert tokenizer.decode(ids) == "one"
        shown = tokenizer.token_bytes(ids)
        assert shown[-2:] == [f"<id {tokenizer.vocab_size}>".encode(), b"<id -1>"]

    def test_the_end_token_is_no_text(self, tokenizer: TextTokenizer) -> None:
        end = tokenizer.eos_ids[0]
        assert 0 <= end < tokenizer.vocab_size
        assert tokenizer.decode([*tokenizer.encode("one"), end]) == "one"
        assert tokenizer.token_bytes([end])[0] in (b"</s>", b"<|im_end|>")

    def test_a_dialogue_ends_where_the_answer_begins(self, tokenizer: TextTokenizer) -> None:
        ids = tokenizer.apply_chat_template(MESSAGES)
        text = b"".join(tokenizer.token_bytes(ids)).decode()
        expected = {
            2: "<s>user: one plus two</s>assistant:",
            1: "<|im_start|>user\none plus two<|im_end|>\n<|im_start|>assistant\n",
        }
        assert text in expected.values()
        assert tokenizer.eos_ids[0] in ids
        assert ids.dtype == np.int64


class TestHuggingFace:
    def test_ends_with_any_id_that_the_model_names(self, hugging_face: TextTokenizer) -> None:
        assert hugging_face.eos_ids == (2, 0)

    def test_a_template_may_refuse(self, hugging_face: TextTokenizer) -> None:
        with pytest.raises(ValueError, match=r"messages must suit the chat template .*no tools"):
            hugging_face.apply_chat_template([{"role": "tool", "content": ""}])

    def test_asks_nothing_of_the_network(
        self, folder: Path, hugging_face: TextTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []

        def refuse(*where: object, **_: object) -> None:
            asked.append(where)
            raise OSError("no network")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(socket.socket, "connect", refuse)
        again = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(folder / "hf")))
        assert asked == []
        assert again.vocab_size == hugging_face.vocab_size
        assert again.encode(HARD).tolist() == hugging_face.encode(HARD).tolist()

    def test_without_a_template(self, folder: Path, template: str) -> None:
        path = folder / "plain"
        save_hugging_face(path, chat_template=None)
        plain = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(path)))
        with pytest.raises(ValueError, match="messages need a tokenizer with a chat template"):
            plain.apply_chat_template(MESSAGES)
        config = TokenizerConfig("HuggingFaceTokenizer", str(path), chat_template=template)
        ids = build_tokenizer(config).apply_chat_template(MESSAGES)
        shown = b"".join(plain.token_bytes(ids)).decode()
        assert shown == "user: one plus two<|im_end|>assistant:"

    def test_a_name_of_the_hub_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer_model must be a local directory"):
            TokenizerConfig("HuggingFaceTokenizer", "Qwen/Qwen3-0.6B")


class TestSentencePiece:
    def test_control_tokens_are_read_in_dialogues_alone(
        self, sentence_piece: TextTokenizer, folder: Path
    ) -> None:
        own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "small.model"))
        plain = sentence_piece.encode("[INST] one").tolist()
        assert plain == own.encode("[INST] one")
        assert own.piece_to_id("[INST]") not in plain
        messages = [{"role": "[INST]x[INST]", "content": "one"}]
        ids = sentence_piece.apply_chat_template(messages).tolist()
        controls = ["<s>", "[INST]x", "[INST]"]
        assert ids[:3] == [own.piece_to_id(piece) for piece in controls]
        assert own.piece_to_id("</s>") in ids[3:]

    def test_only_the_start_of_a_text_gets_a_space(self, sentence_piece: TextTokenizer) -> None:
        ids = sentence_piece.apply_chat_template(MESSAGES)
        pieces = b"".join(sentence_piece.token_bytes(ids))
        assert pieces == b"<s>user: one plus two</s>assistant:"
        assert b"".join(sentence_piece.token_bytes(sentence_piece.encode("one"))) == b" one"

    def test_a_broken_template_is_named(self, folder: Path) -> None:
        path = folder / "broken.jinja"
        path.write_text("{% for %}", encoding="utf-8")
        model = str(folder / "small.model")
        config = TokenizerConfig("Llama2Tokenizer", model, chat_template=str(path))
        with pytest.raises(ConfigError, match="chat_template must be a Jinja template"):
            build_tokenizer(config)


def test_a_template_cannot_reach_out(folder: Path, sentence_piece: TextTokenizer) -> None:
    path = folder / "hostile.jinja"
    path.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}", encoding="utf-8")
    model = str(folder / "small.model")
    config = TokenizerConfig("Llama2Tokenizer", model, chat_template=str(path))
    with pytest.raises(ValueError, match=r"messages must suit the chat template .SecurityError"):
        build_tokenizer(config).apply_chat_template(MESSAGES)


class TestIdsOnly:
    TOKENIZER = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=100))

    def test_ids_are_written_as_numbers(self) -> None:
        assert self.TOKENIZER.encode("5 7  99").tolist() == [5, 7, 99]
        assert self.TOKENIZER.decode([5, 7, 120]) == "5 7 120"
        assert self.TOKENIZER.token_bytes([5, 7]) == [b"5", b" 7"]
        assert (self.TOKENIZER.vocab_size, self.TOKENIZER.eos_ids) == (100, (99,))

    @pytest.mark.parametrize("word", ["100", "-1", "one", "1.5", "²"])
    def test_what_is_no_id_is_refused(self, word: str) -> None:
        with pytest.raises(ValueError, match=f"text must list ids below 100 .*: text='{word}'"):
            self.TOKENIZER.encode(f"5 {word}")

    def test_dialogues_are_refused(self) -> None:
        with pytest.raises(ValueError, match="messages must not be given to NullTokenizer"):
            self.TOKENIZER.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer_type": "BertWordPieceCase"}, "tokenizer_type must be one of Hugging"),
        ({"tokenizer_type": "TikTokenizer"}, "tokenizer_model must be given for TikTokenizer"),
        (
            {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/no/such"},
            "tokenizer_model must be a file: tokenizer_model='/no/such'",
        ),
        ({"tokenizer_type": "NullTokenizer"}, "vocab_size must be given for NullTokenizer"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "vocab_size must be positive"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "tokenizer_model": "x"},
            "tokenizer_model needs a tokenizer that has text",
        ),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "tiktoken_pattern": "v1"},
            "tiktoken_pattern needs TikTokenizer",
        ),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "chat_template": "/no/such"},
            "chat_template must be a file",
        ),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(**fields)  # type: ignore[arg-type]


def test_a_file_of_another_kind_is_named(tiktoken_file: str) -> None:
    rule = "tokenizer_model must be files of a Llama2Tokenizer"
    with pytest.raises(ConfigError, match=rule):
        build_tokenizer(TokenizerConfig("Llama2Tokenizer", tiktoken_file))
    with pytest.raises(ConfigError, match=r"must be files of a TikTokenizer .AssertionError"):
        build_tokenizer(TokenizerConfig("TikTokenizer", tiktoken_file, vocab_size=5000))


def test_a_missing_library_names_its_extra(
    tiktoken_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'megatron-slime\[text\]'"):
        build_tokenizer(TokenizerConfig("TikTokenizer", tiktoken_file))


class TestPieces:
    def test_byte_level_pieces_are_any_bytes(self) -> None:
        assert byte_level_bytes("Ġhi") == b" hi"
        assert byte_level_bytes("ðŁĺĢ") == "😀".encode()
        assert byte_level_bytes("三") == "三".encode()

    def test_bytes_that_are_no_text(self) -> None:
        assert piece_texts([b"a\xe4", b"\xb8", b"\x89b", b"\xff", b"\xe4"]) == [
            "a",
            "",
            "三b",
            "\ufffd",
            "\ufffd",
        ]
        assert piece_texts([]) == []
