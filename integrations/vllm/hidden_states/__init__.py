"""Hidden states of whole prompts from vLLM, also where a prefix is cached: rows along the blocks of the KV cache."""

from .prompts import PromptHiddenStates
from .worker import ASKED, HiddenStatesWorker, take_hidden_states, take_prompt_logprobs

__all__ = ["ASKED", "HiddenStatesWorker", "PromptHiddenStates", "take_hidden_states", "take_prompt_logprobs"]
