"""The small byte-level language model of the demo, and the text it reads."""

from imbrex.demo.corpus import Corpus, load_corpus
from imbrex.demo.model import BytesLM, BytesLMConfig

__all__ = ["BytesLM", "BytesLMConfig", "Corpus", "load_corpus"]
