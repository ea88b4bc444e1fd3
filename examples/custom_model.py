"""A model of one's own on torch.ops.pc.*: a prefix computed once for two prompts, decode in a CUDA graph on a GPU.

Run: python examples/custom_model.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pc

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, BLOCK = 8, 2, 32, 4, 512, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Batch:
    """Where the tokens of a step are: the same tensors for every layer."""

    def __init__(self, positions, slots, tables, seq_lens, starts):
        self.positions, self.slots, self.tables, self.seq_lens, self.starts = positions, slots, tables, seq_lens, starts
        self.plan = pc.attention_plan(tables, seq_lens, starts, BLOCK, num_kv_heads=KV_HEADS)

    def refresh(self):
        """Builds the plan anew in the same memory, so that a captured graph reads this step's."""
        pc.attention_plan(self.tables, self.seq_lens, self.starts, BLOCK, num_kv_heads=KV_HEADS, out=self.plan)


class Layer(nn.Module):
    """Attention over the cache, then a feed-forward network."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, keys, values, cos_sin, batch):
        qkv = self.qkv(self.norm_1(x)).view(len(x), -1, HEAD_DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q = torch.ops.pc.rope_and_cache(q, k, v, batch.positions, cos_sin, keys, values, batch.slots)
        attended = torch.ops.pc.paged_attention(
            q, keys, values, batch.tables, batch.seq_lens, batch.starts, HEAD_DIM**-0.5, plan=batch.plan
        )
        x = x + self.out(attended.flatten(1))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A decoder whose keys and values live in the blocks of a `pc.CacheManager`."""

    def __init__(self, num_blocks):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, VOCABULARY, bias=False)
        angles = torch.arange(4096)[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], 1))
        self.register_buffer("cache", torch.zeros(LAYERS, 2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM))

    def forward(self, tokens, batch):
        x = self.embed(tokens)
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            x = layer(x, keys, values, self.cos_sin, batch)
        return self.head(self.norm(x[(batch.starts[1:] - 1).long()]))  # of the last token of each sequence


def prefill(model, manager, request, prompt):
    """Computes what of a prompt is not cached; its logits and how many tokens were computed."""
    allocation = manager.allocate(request, prompt)
    todo = [position for span in allocation.compute_spans for position in range(*span)]
    batch = Batch(
        torch.tensor(todo, device=DEVICE),
        torch.from_numpy(allocation.slot_mapping).to(DEVICE),
        torch.from_numpy(manager.block_table(request))[None].to(DEVICE),
        torch.tensor([len(prompt)], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, len(todo)], dtype=torch.int32, device=DEVICE),
    )
    logits = model(torch.tensor([prompt[position] for position in todo], device=DEVICE), batch)
    manager.commit(request, len(prompt))
    return logits, len(todo)


class Decoder:
    """One token a call: eager on a CPU; on a GPU one captured graph, whose inputs are copied into its memory."""

    def __init__(self, model, max_blocks):
        def ints(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        self.model, self.graph = model, None
        self.token = ints(1, dtype=torch.int64)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        tables = ints(1, max_blocks) - 1
        self.batch = Batch(ints(1, dtype=torch.int64), ints(1, dtype=torch.int64) - 1, tables, ints(1), starts)

    def step(self, token, length, allocation, table):
        batch = self.batch
        self.token.fill_(token)
        batch.positions.fill_(length - 1)
        batch.seq_lens.fill_(length)
        batch.slots.copy_(torch.from_numpy(allocation.slot_mapping))
        batch.tables[0, : len(table)].copy_(torch.from_numpy(table))
        if DEVICE.type == "cpu":
            batch.refresh()
            return self.model(self.token, batch)
        if self.graph is None:  # writing one token's keys a second time changes nothing
            batch.refresh()
            self.model(self.token, batch)  # kernels are compiled before the capture
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                batch.refresh()
                self.logits = self.model(self.token, batch)
        self.graph.replay()
        return self.logits


@torch.inference_mode()
def main():
    """Two prompts that share 200 tokens, then an answer of 16 tokens, compared with computing everything anew."""
    torch.manual_seed(0)
    manager, model = pc.CacheManager(num_blocks=64, block_size=BLOCK), Model(num_blocks=64).to(DEVICE)
    shared = torch.randint(VOCABULARY, (200,)).tolist()
    for name, own in (("first", [1, 2, 3]), ("second", [4, 5, 6, 7])):
        logits, computed = prefill(model, manager, name, shared + own)
        print(f"{name}: {len(shared + own)} tokens, {computed} computed")
    decoder, tokens = Decoder(model, max_blocks=32), [*shared, 4, 5, 6, 7]
    for _ in range(16):
        tokens.append(int(logits.argmax()))
        allocation = manager.append("second", tokens[-1:])
        logits = decoder.step(tokens[-1], len(tokens), allocation, manager.block_table("second"))
        manager.commit("second", len(tokens))
    fresh = pc.CacheManager(num_blocks=64, block_size=BLOCK)
    expected, computed = prefill(model, fresh, "again", tokens)
    assert computed == len(tokens)
    error = (logits - expected).abs().max().item()
    assert error < 1e-2, error
    print(f"answer: {tokens[-16:]}; logits as of a computation without a cache, but for {error:.1e}")


if __name__ == "__main__":
    main()
