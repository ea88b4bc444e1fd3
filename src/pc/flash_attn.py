"""FlashAttention's functions, computed by this package: `from pc.flash_attn import flash_attn_varlen_func`."""

from .triton_ops.flash_attn import __all__ as __all__
from .triton_ops.flash_attn import flash_attn_combine as flash_attn_combine
from .triton_ops.flash_attn import flash_attn_func as flash_attn_func
from .triton_ops.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from .triton_ops.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
from .triton_ops.flash_attn import get_scheduler_metadata as get_scheduler_metadata
