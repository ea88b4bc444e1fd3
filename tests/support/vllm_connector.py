"""A KV connector for vLLM that claims 64 tokens of external KV for prompts beginning with 499, and loads nothing."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Claims(KVConnectorBase_V1):
    """The connector. Its KV is never checked; the blocks contain another prompt's rows of hidden states."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        claimed = request.prompt_token_ids[0] == 499 and num_computed_tokens < 64
        return (64 - num_computed_tokens if claimed else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, *args, **kwargs):
        pass

    def wait_for_save(self):
        pass
