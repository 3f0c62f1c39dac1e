"""Kernels that exchange rows over NVLink, and the host's side of them."""

from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.failures import ExchangeError

__all__ = ["ExchangeError", "NvlinkExchange"]
