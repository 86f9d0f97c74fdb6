"""Pre-tokenizers of GGUF files, by the names that llama.cpp gives them: how text is cut before tokens are merged.

The patterns are those that the models were published with. llama.cpp approximates some of them: in gpt-4o, tekken,
kimi-k2 and youtu the letters with case and the marks, in tiny_aya and superbpe the digits of other scripts.
"""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from runtime.errors import ModelError


class Cuts(NamedTuple):
    """A pre-tokenizer.

    Attributes:
        patterns: regular expressions. Each cuts the pieces that those before it left, around each of its matches.
        whole: whether a piece that is a token stays one, whatever the merges say.
        begins: whether a prompt begins with the BOS if the file does not say.
        composed: whether text is brought to Unicode's form NFC first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer, which also spells bytes as characters."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def cuts_of(file: str, name: str) -> Cuts:
    """The pre-tokenizer of a file. Raises ModelError for an unknown name."""
    if (found := _NAMED.get(name)) is None:
        raise ModelError(f"{file}: pre-tokenizer {name!r}; supported in GGUF are {', '.join(_NAMED)}")
    return found


_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANK = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _like_llama3(digits: str) -> str:
    return f"{_SHORT}|{_WORD}|{digits}|{_SIGNS}|{_BLANK}"


_LLAMA3, _QWEN2 = _like_llama3(_THREE_DIGITS), _like_llama3(_DIGIT)
# Marks belong to the letters before them.
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def _like_gpt4o(after: str, digits: str, but: str = "", signs: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    """Words also end between lower and upper case. `after`: what may end a word; `but`: letters that are no part."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kind in (r"Lu}\p{Lt", "Ll"))
    return f"{start}{upper}*{lower}+{after}|{start}{upper}+{lower}*{after}|{digits}|{signs}|{_BLANK}"


_GPT4O = _like_gpt4o(f"{_SHORT}?", _THREE_DIGITS)

_CHINESE = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANK}"
)
# The letters with a case that DeepSeek's first tokenizer lists.
_CASED = (
    r"[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}"
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}"
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}"
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}"
    r"\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}"
    r"\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]"
)
_WIDE_SIGNS = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]"
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}"
    r"\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|" + _HAN_AND_KANA
)
_NO_PUNCTUATION = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_FALLING_BLANKS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"

_EVERY = {
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 mellum gigachat a.x-4.0 granite-docling": Cuts((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Cuts((_DIGIT, _GPT2)),
    "default": Cuts((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": Cuts((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0": Cuts((_LLAMA3,), whole=True, begins=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": Cuts((_LLAMA3,)),
    "minicpm5": Cuts((_THREE_DIGITS, _like_llama3(r"\p{N}+")), whole=True),
    "jais-2": Cuts((f"{_SHORT}|{_WORD}|{_THREE_DIGITS}|{_SIGNS}|\\s*[\\r\\n]+|{_FALLING_BLANKS}",)),
    "qwen2 deepseek-r1-qwen": Cuts((_QWEN2,), composed=True),
    "stablelm2 hunyuan megrez solar-open grok-2 kormo": Cuts((_QWEN2,)),
    "qwen35": Cuts((_QWEN35,), composed=True),
    "laguna": Cuts((r"[^\n]+|[\n]+", _QWEN2)),
    "ufakzeka": Cuts((f"{_WORD}|{_DIGIT}|{_SIGNS}|{_BLANK}",)),
    "seed-coder": Cuts((rf"{_SHORT}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANK}",)),
    "bailingmoe bailingmoe2 llada-moe": Cuts((rf"{_SHORT}|{_WORD}|{_DIGIT}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "exaone-moe": Cuts(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gpt-4o llama4 kanana2 minimax-m2": Cuts((_GPT4O,)),
    "tekken": Cuts((_like_gpt4o("", _DIGIT),), whole=True, begins=True),
    "tiny_aya cohere2moe": Cuts((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "kimi-k2": Cuts((r"[\p{Han}]+|" + _like_gpt4o(f"{_SHORT}?", _THREE_DIGITS, r"&&[^\p{Han}]", _SIGNS),)),
    "deepseek-llm": Cuts(
        (r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_WIDE_SIGNS}+", r"\s+$", _CHINESE, r"\p{N}+"),
    ),
    "deepseek-coder": Cuts((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, _DIGIT)),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": Cuts((_THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK3)),
    "youtu": Cuts((_YOUTU, _like_gpt4o(f"{_SHORT}?", _DIGIT)), whole=True),
    "poro-chat bloom gpt3-finnish": Cuts((_NO_PUNCTUATION,)),
    "viking": Cuts((_NO_PUNCTUATION, _DIGIT)),
    "superbpe": Cuts((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}
_NAMED = {name: cuts for names, cuts in _EVERY.items() for name in names.split()}
