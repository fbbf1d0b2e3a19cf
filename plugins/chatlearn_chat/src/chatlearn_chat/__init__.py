"""Converts conversations to tokens: chat templates, turns, and control tokens that data cannot forge."""

from chatlearn_chat.control_tokens import ControlTokens
from chatlearn_chat.renderer import ChatTemplateRenderer

__all__ = ["ChatTemplateRenderer", "ControlTokens"]
