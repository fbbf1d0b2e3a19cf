"""Environments in which a policy acts over several turns: tool calls and corrections."""
