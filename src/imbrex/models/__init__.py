"""The small byte-level language model of the demo, and the text it reads."""

from imbrex.models.bytes_lm import BytesLM, BytesLMConfig
from imbrex.models.corpus import Corpus, load_corpus

__all__ = ["BytesLM", "BytesLMConfig", "Corpus", "load_corpus"]
