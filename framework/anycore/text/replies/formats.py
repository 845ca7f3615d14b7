"""The formats of tool calls that anycore brings."""

from __future__ import annotations

from anycore.text.replies.deepseek import DeepSeekV3, DeepSeekV31
from anycore.text.replies.gemma import FunctionGemma, Gemma4
from anycore.text.replies.hermes import Hermes
from anycore.text.replies.llama3 import Llama3
from anycore.text.replies.mistral import Mistral
from anycore.text.replies.parts import ToolFormat
from anycore.text.replies.pythonic import Pythonic
from anycore.text.replies.qwen_xml import QwenXml

BUILT_IN: tuple[ToolFormat, ...] = (
    QwenXml(),
    Hermes(),
    Mistral(),
    DeepSeekV3(),
    DeepSeekV31(),
    Gemma4(),
    FunctionGemma(),
    Pythonic(),
    Llama3(),
)
"""In the order in which they are asked whether they fit a chat template."""
