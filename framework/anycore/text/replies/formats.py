"""The formats of tool calls and reasoning that anycore brings, by the hook that others bring theirs by."""

from __future__ import annotations

from anycore import hookimpl
from anycore.text.replies.deepseek import DeepSeekV3, DeepSeekV31
from anycore.text.replies.deepseek_xml import DeepSeekV32
from anycore.text.replies.gemma import FunctionGemma, Gemma4
from anycore.text.replies.glm import Glm
from anycore.text.replies.hermes import Hermes
from anycore.text.replies.kimi import Kimi
from anycore.text.replies.llama3 import Llama3
from anycore.text.replies.mistral import Mistral
from anycore.text.replies.parts import Format, ReasoningFormat, ToolFormat
from anycore.text.replies.pythonic import Pythonic
from anycore.text.replies.qwen_xml import QwenXml

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    QwenXml(),
    Glm(),
    Hermes(),
    Mistral(),
    DeepSeekV3(),
    DeepSeekV31(),
    DeepSeekV32(),
    Kimi(),
    Gemma4(),
    FunctionGemma(),
    Pythonic(),
    Llama3(),
)
"""In the order in which they are asked whether they fit a chat template."""

REASONING_FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek R1, Qwen 3, GLM, and most others
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


@hookimpl
def register_reply_formats() -> list[Format]:
    return [*TOOL_FORMATS, *REASONING_FORMATS]
