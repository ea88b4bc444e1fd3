"""Pass the hidden states of whole prompts from one stage to the next, although only new tokens are computed.

A thinker reads prompts through a KV cache. A talker needs the thinker's hidden states of the whole prompt. On a hit the
thinker computes only the rest, and `pc.TensorCache` has the hidden states of the cached tokens.

Run: python examples/hidden_states.py
"""

from __future__ import annotations

import torch
from custom_model import BLOCK, Batch, Llama
from small_model import DEVICE, load_untrained
from torch import nn

import pc


class Talker(nn.Module):
    """A recurrent network over all hidden states of the prompt."""

    def __init__(self, width):
        super().__init__()
        self.rnn = nn.GRU(width, 64, batch_first=True)

    def forward(self, hidden):
        """Return a summary of the hidden states `[tokens, width]`."""
        return self.rnn(hidden[None])[1][0, 0]


def think(thinker, manager, tensors, request, prompt):
    """Return the hidden states `[len(prompt), width]` of a prompt, and how many of its tokens were computed."""
    allocation = manager.allocate(request, prompt)
    tensors.prepare(allocation)
    [(start, end)] = allocation.compute_spans
    batch = Batch(
        torch.arange(start, end, device=DEVICE),
        torch.from_numpy(allocation.slot_mapping).to(DEVICE),
        torch.from_numpy(manager.block_table(request))[None].to(DEVICE),
        torch.tensor([end], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
        thinker.kv_heads,
    )
    hidden = thinker.hidden(torch.tensor(prompt[start:end], device=DEVICE), batch)
    step = pc.Step.of({request: allocation}, {"hidden": hidden})
    whole = tensors.join(step)[request]["hidden"]  # cached rows, then the new ones
    tensors.store(step)
    manager.commit(request, len(prompt))
    manager.free(request)
    return whole, end - start


@torch.inference_mode()
def main():
    """Run three prompts with a common prefix, and compare each with a computation without a cache."""
    model, tokenizer = load_untrained()
    thinker, talker = Llama(model, num_blocks=64), Talker(model.config.hidden_size).to(DEVICE)
    manager = pc.CacheManager(num_blocks=64, block_size=BLOCK)
    tensors = pc.TensorCache(manager, num_blocks=64, block_size=BLOCK, device=str(DEVICE))
    shared = torch.randint(len(tokenizer), (300,)).tolist()
    said = {}
    for name, own in (("one", [1, 2, 3]), ("two", [4, 5]), ("three", [6, 7, 8, 9])):
        hidden, computed = think(thinker, manager, tensors, name, shared + own)
        said[name] = talker(hidden)
        print(f"{name}: hidden states of {len(hidden)} tokens, {computed} computed")
    for name, own in (("one", [1, 2, 3]), ("two", [4, 5]), ("three", [6, 7, 8, 9])):
        manager.reset()
        hidden, computed = think(thinker, manager, tensors, name, shared + own)
        assert computed == len(hidden)
        torch.testing.assert_close(talker(hidden), said[name], atol=1e-3, rtol=1e-3)
    print("the talker gives the same output as over hidden states that were all computed")


if __name__ == "__main__":
    main()
