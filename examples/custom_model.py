"""Run a Llama on torch.ops.pc.*: read a text once for two questions, and decode in a CUDA graph on a GPU.

The loaded model gives linear layers and norms. Attention, rotary embedding and cache writes are operators of `pc`, over
the blocks of a `pc.CacheManager`.

Run: python examples/custom_model.py
"""

from __future__ import annotations

import torch
from small_model import DEVICE, article, load
from torch import nn

import pc

BLOCK = 16


class Batch:
    """The tensors that place the tokens of a step, shared by all layers."""

    def __init__(self, positions, slots, tables, seq_lens, starts, kv_heads):
        self.positions, self.slots, self.tables, self.seq_lens, self.starts = positions, slots, tables, seq_lens, starts
        self.kv_heads = kv_heads
        self.plan = pc.attention_plan(tables, seq_lens, starts, BLOCK, num_kv_heads=kv_heads)

    def refresh(self):
        """Rebuild the plan in the same memory, so that a captured graph reads the plan of this step."""
        pc.attention_plan(self.tables, self.seq_lens, self.starts, BLOCK, num_kv_heads=self.kv_heads, out=self.plan)

    def attend(self, layer, q, keys, values):
        """Return the attention `[tokens, heads, head_dim]` of layer number `layer` over the blocks of its cache."""
        call = (q, keys, values, self.tables, self.seq_lens, self.starts, q.shape[-1] ** -0.5)
        return torch.ops.pc.paged_attention(*call, plan=self.plan)


class Llama(nn.Module):
    """A Llama of transformers that stores keys and values in the blocks of a `pc.CacheManager`."""

    def __init__(self, model, num_blocks):
        super().__init__()
        config, rotary = model.config, model.model.rotary_emb
        self.body, self.head, self.kv_heads, self.head_dim = (
            *(model.model, model.lm_head, config.num_key_value_heads),
            model.model.layers[0].self_attn.head_dim,
        )
        positions = torch.arange(config.max_position_embeddings, device=DEVICE)
        angles = positions[:, None] * rotary.inv_freq.float()
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], 1).to(model.dtype))
        shape = (config.num_hidden_layers, 2, num_blocks, BLOCK, self.kv_heads, self.head_dim)
        self.register_buffer("cache", torch.zeros(shape, dtype=model.dtype, device=DEVICE))

    def hidden(self, tokens, batch):
        """Return the last hidden states `[tokens, width]`."""
        x = self.body.embed_tokens(tokens)
        for number, (layer, (keys, values)) in enumerate(zip(self.body.layers, self.cache, strict=True)):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (projection(normed).unflatten(1, (-1, self.head_dim)) for projection in projections)
            q = torch.ops.pc.rope_and_cache(q, k, v, batch.positions, self.cos_sin, keys, values, batch.slots)
            x = x + attention.o_proj(batch.attend(number, q, keys, values).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.body.norm(x)

    def forward(self, tokens, batch):
        """Return the logits of the last token of each sequence."""
        return self.head(self.hidden(tokens, batch)[(batch.starts[1:] - 1).long()])


def prefill(llama, manager, request, prompt):
    """Compute the tokens of a prompt that are not cached. Return the next token's logits and the number computed."""
    allocation = manager.allocate(request, prompt)
    todo = [position for span in allocation.compute_spans for position in range(*span)]
    batch = Batch(
        torch.tensor(todo, device=DEVICE),
        torch.from_numpy(allocation.slot_mapping).to(DEVICE),
        torch.from_numpy(manager.block_table(request))[None].to(DEVICE),
        torch.tensor([len(prompt)], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, len(todo)], dtype=torch.int32, device=DEVICE),
        llama.kv_heads,
    )
    logits = llama(torch.tensor([prompt[position] for position in todo], device=DEVICE), batch)
    manager.commit(request, len(prompt))
    return logits, len(todo)


class Decoder:
    """Decoding of one token a call, eagerly on a CPU, and on a GPU by a captured graph with fixed input memory."""

    def __init__(self, llama, max_blocks):
        def ints(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        self.llama, self.graph = llama, None
        self.token = ints(1, dtype=torch.int64)
        starts, tables = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), ints(1, max_blocks) - 1
        where = (ints(1, dtype=torch.int64), ints(1, dtype=torch.int64) - 1, tables, ints(1), starts)
        self.batch = Batch(*where, llama.kv_heads)

    def step(self, token, length, allocation, table):
        """Compute a token, the last of `length`, and return the logits of the next one."""
        batch = self.batch
        self.token.fill_(token)
        batch.positions.fill_(length - 1)
        batch.seq_lens.fill_(length)
        batch.slots.copy_(torch.from_numpy(allocation.slot_mapping))
        batch.tables[0, : len(table)].copy_(torch.from_numpy(table))
        if DEVICE.type == "cpu":
            batch.refresh()
            return self.llama(self.token, batch)
        if self.graph is None:  # writing one token's keys a second time changes nothing
            batch.refresh()
            self.llama(self.token, batch)  # kernels are compiled before the capture
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                batch.refresh()
                self.logits = self.llama(self.token, batch)
        self.graph.replay()
        return self.logits


@torch.inference_mode()
def main():
    """Ask two questions about one text, and compare each answer with that of transformers' own attention and cache."""
    model, tokenizer = load()
    manager, llama = pc.CacheManager(num_blocks=128, block_size=BLOCK), Llama(model, num_blocks=128)
    worked = "Q: In what is the executive power vested?\nA: In a President of the United States of America."
    for question in ("In what court is the judicial power vested?", "How many witnesses convict of treason?"):
        prompt = tokenizer.encode(f"The text:\n\n{article('III', 'IV')}\n\n{worked}\n\nQ: {question}\nA:")
        logits, computed = prefill(llama, manager, question, prompt)
        decoder, tokens = Decoder(llama, max_blocks=128), list(prompt)
        for _ in range(8):
            tokens.append(int(logits.argmax()))
            allocation = manager.append(question, tokens[-1:])
            logits = decoder.step(tokens[-1], len(tokens), allocation, manager.block_table(question))
            manager.commit(question, len(tokens))
        said = tokenizer.decode(tokens[len(prompt) :]).split("\n")[0]
        print(f"{len(prompt)} tokens, {computed} computed: {question}{said}")
        error = (logits - model(torch.tensor([tokens], device=DEVICE), logits_to_keep=1).logits[0]).abs().max().item()
        assert error < 1e-2, error
    print(f"largest difference from the logits of transformers' own attention: {error:.1e}")


if __name__ == "__main__":
    main()
